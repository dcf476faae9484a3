/* What Python hands over: tensors, operations, and the memory they live in. `structures.py` mirrors these declarations. */
#ifndef ARCHIPELAGO_PLAN_H
#define ARCHIPELAGO_PLAN_H

#include "lanes.h"

/* A tensor: [group][channel][halo + height + halo][halo + width + halo][16 lanes], values and, in training, gradients.
 * The halo is as wide as its readers' padding and is zero for ever: nobody writes there, so that no kernel has a special case
 * for the border. The gradient has a halo of its own, for the backward pass of the convolution that made the tensor. */
typedef struct {
    int64_t value, gradient; /* where they begin in the arena, in floats; gradient: -1 if there is none */
    int32_t channels, height, width;
    int32_t halo_y, halo_x, gradient_halo_y, gradient_halo_x;
    int32_t reserved;
} Tensor;

enum { CONVOLUTION, LINEAR, MAX_POOL, AVERAGE_POOL, RELU, ADD, COPY, BATCH_NORM, GROUP_NORM, KINDS };

typedef struct {
    int32_t kind;
    int32_t in, second, out;          /* tensors; `second` of ADD alone */
    int32_t relu;                     /* max(0, .) of the output, in the same pass */
    int32_t to_input, to_second;      /* gradient of the input: 0 not needed, 1 set, 2 added to what is there */
    int32_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x;
    int32_t count_padding;            /* AVERAGE_POOL divides by the window with its padding */
    int32_t norm_groups;              /* GROUP_NORM */
    int32_t reserved;
    int64_t weight, bias, mean, variance; /* where they are in the model vector; -1: none */
    int64_t kept;                     /* in the arena: what the backward pass needs of the forward pass */
    int64_t kept_size;
    float epsilon, momentum;
} Operation;

typedef struct {
    const Tensor *tensors;
    const Operation *operations;
    int32_t tensor_count, operation_count;
    int32_t groups;                   /* the arena has memory for so many */
    int32_t output;                   /* the tensor of logits: channels x 1 x 1 */
    float *arena;
    int64_t arena_size;
    int64_t workspace, workspace_size; /* in the arena, free for every operation in turn */
    int64_t model_size;               /* floats of a model vector */
} Plan;

/* One batch as a kernel sees it. */
typedef struct {
    const Plan *plan;
    float *model;     /* parameters and running statistics */
    float *gradient;  /* of the parameters; NULL in a forward pass */
    float *workspace;
    int batch, groups;
    int training;
} Run;

/* A tensor's values or gradients with their strides, in floats. `at` is pixel (0, 0) of channel 0 of group 0. */
typedef struct {
    float *at;
    long row, plane, group;
    int channels, height, width;
} View;

ALWAYS_INLINE View view_of(const Plan *plan, const Tensor *t, int64_t start, int halo_y, int halo_x)
{
    View v;
    v.row = (long)(t->width + 2 * halo_x) * GROUP;
    v.plane = (t->height + 2 * halo_y) * v.row;
    v.group = t->channels * v.plane;
    v.at = plan->arena + start + halo_y * v.row + halo_x * GROUP;
    v.channels = t->channels, v.height = t->height, v.width = t->width;
    return v;
}
ALWAYS_INLINE View values(const Plan *plan, int tensor)
{
    const Tensor *t = plan->tensors + tensor;
    return view_of(plan, t, t->value, t->halo_y, t->halo_x);
}
ALWAYS_INLINE View gradients(const Plan *plan, int tensor)
{
    const Tensor *t = plan->tensors + tensor;
    return view_of(plan, t, t->gradient, t->gradient_halo_y, t->gradient_halo_x);
}
ALWAYS_INLINE float *row_of(View v, int group, int channel, int y)
{
    return v.at + group * v.group + channel * v.plane + y * v.row;
}

/* Samples of a group that are there; the lanes above are padding. */
ALWAYS_INLINE int live_lanes(const Run *run, int group)
{
    int left = run->batch - group * GROUP;
    return left < GROUP ? left : GROUP;
}

/* All rows of a tensor; `height` and `width` as in the view called `v`. */
#define FOR_ROWS(run, v) \
    for (int g = 0; g < (run)->groups; g++) \
        for (int c = 0; c < (v).channels; c++) \
            for (int y = 0; y < (v).height; y++)
#define FOR_LANES(width, i) for (long i = 0; i < (long)(width) * GROUP; i += LANES)

#endif
