/* Convolutions and linear layers, forward and backward, on the tiles of tiles.h. */
#ifndef ARCHIPELAGO_CONTRACT_H
#define ARCHIPELAGO_CONTRACT_H

#include <string.h>

#include "plan.h"
#include "tiles.h"

ALWAYS_INLINE int smaller(int a, int b) { return a < b ? a : b; }
ALWAYS_INLINE int larger(int a, int b) { return a > b ? a : b; }
ALWAYS_INLINE int round_up(int a, int b) { return (a + b - 1) / b * b; }
ALWAYS_INLINE int taps_of(const Operation *op, int channels) { return op->kernel_y * op->kernel_x * channels; }

/* --- a sum over taps at every output pixel ------------------------------------------------------------------------------ */

/* out[c][y][x] = bias[c] + sum over (ky, kx, d) of weight[c][ky][kx][d] * in[d][y_first + y y_pixel + ky y_tap][...x...].
 * Forward, taps go up and pixels go by the stride; backward, taps go down, and each of the stride's phases is one such sum. */
typedef struct {
    View in, out; /* of one group; `out` with the strides of the pixels that this sum fills */
    int y_first, y_pixel, y_tap, kernel_y;
    int x_first, x_pixel, x_tap, kernel_x;
    long out_x;
    const float *weight; /* packed for `tile` */
    const float *bias;
    const int32_t *offset; /* [kx][d] */
    TileShape tile;
    int add, relu;
} Correlation;

/* Taps k in [*first, *last) whose input index at + k step lies in [0, size) for at least one of the `pixels`. The others are
 * zeros of the halo. */
static void clip(int at, int pixel, int pixels, int step, int taps, int size, int *first, int *last)
{
    int low = at, high = at + (pixels - 1) * pixel;
    *first = 0, *last = taps;
    while (*first < *last && (high + *first * step < 0 || low + *first * step >= size)) ++*first;
    while (*last > *first && (high + (*last - 1) * step < 0 || low + (*last - 1) * step >= size)) --*last;
}

static void correlate(const Correlation *k)
{
    const int per_row = k->kernel_x * k->in.channels;
    ForwardTile t;
    t.in_x = (long)k->x_pixel * GROUP, t.in_row = k->y_tap * k->in.row, t.offset = k->offset;
    t.out_channel = k->out.plane, t.out_x = k->out_x, t.add = k->add, t.relu = k->relu;
    for (int half = 0; half < HALVES; half++) {
        for (int y = 0; y < k->out.height; y++) {
            int top, bottom, y_in = k->y_first + y * k->y_pixel;
            clip(y_in, 0, 1, k->y_tap, k->kernel_y, k->in.height, &top, &bottom);
            t.rows = bottom - top;
            for (int x = 0; x < k->out.width; x += k->tile.b) {
                const int pixels = smaller(k->tile.b, k->out.width - x);
                const int x_in = k->x_first + x * k->x_pixel;
                int left, right;
                clip(x_in, k->x_pixel, pixels, k->x_tap, k->kernel_x, k->in.width, &left, &right);
                t.first = left * k->in.channels, t.last = right * k->in.channels;
                t.in = k->in.at + (y_in + top * k->y_tap) * k->in.row + (long)x_in * GROUP + half * LANES;
                for (int c = 0; c < k->out.channels; c += k->tile.a) {
                    const int channels = smaller(k->tile.a, k->out.channels - c);
                    t.weight_tap = channels, t.weight_row = (long)per_row * channels;
                    t.weight = k->weight + (long)c * k->kernel_y * per_row + top * t.weight_row;
                    t.bias = k->bias ? k->bias + c : 0;
                    t.out = k->out.at + c * k->out.plane + y * k->out.row + x * k->out_x + half * LANES;
                    FORWARD[channels][pixels](&t);
                }
            }
        }
    }
}

/* Weights in the order in which tiles of `tile` channels read them: [tile][ky][kx][in][channel of the tile]. */
typedef struct {
    const float *weight;
    int outs, ins;
    long out_stride, in_stride;
    int y_first, y_step, kernel_y, x_first, x_step, kernel_x, width; /* width: of a row of the whole kernel */
} Packing;

static void pack(const Packing *p, int tile, float *to)
{
    for (int c = 0; c < p->outs; c += tile) {
        const int channels = smaller(tile, p->outs - c);
        for (int ky = 0; ky < p->kernel_y; ky++)
            for (int kx = 0; kx < p->kernel_x; kx++) {
                const long tap = (long)(p->y_first + ky * p->y_step) * p->width + p->x_first + kx * p->x_step;
                const float *from = p->weight + tap + c * p->out_stride;
                for (int d = 0; d < p->ins; d++, from += p->in_stride)
                    for (int o = 0; o < channels; o++) *to++ = from[o * p->out_stride];
            }
    }
}

static void tap_offsets(int32_t *offset, int taps, int step, long plane, int channels)
{
    for (int kx = 0; kx < taps; kx++)
        for (int d = 0; d < channels; d++) *offset++ = (int32_t)(kx * step * GROUP + d * plane);
}

/* --- convolution ------------------------------------------------------------------------------------------------------------ */

static void convolution_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    int32_t *offset = (int32_t *)run->workspace;
    float *packed = run->workspace + round_up(op->kernel_x * in.channels, GROUP);
    const int taps = op->kernel_y * op->kernel_x;
    Correlation k = {
        .y_first = -op->pad_y, .y_pixel = op->stride_y, .y_tap = 1, .kernel_y = op->kernel_y,
        .x_first = -op->pad_x, .x_pixel = op->stride_x, .x_tap = 1, .kernel_x = op->kernel_x,
        .out_x = GROUP, .weight = packed, .bias = op->bias < 0 ? 0 : run->model + op->bias, .offset = offset,
        .tile = best_tile(out.channels, out.width), .relu = op->relu,
    };
    Packing p = {
        .weight = run->model + op->weight, .outs = out.channels, .ins = in.channels,
        .out_stride = (long)taps * in.channels, .in_stride = taps, .y_step = 1, .kernel_y = op->kernel_y,
        .x_step = 1, .kernel_x = op->kernel_x, .width = op->kernel_x,
    };
    tap_offsets(offset, op->kernel_x, 1, in.plane, in.channels);
    pack(&p, k.tile.a, packed);
    for (int g = 0; g < run->groups; g++) {
        k.in = in, k.out = out;
        k.in.at += g * in.group, k.out.at += g * out.group;
        correlate(&k);
    }
}

/* d in[y] = sum over ky of w[ky] d out[(y + pad - ky) / stride] where that is whole: for y = r + stride i, the taps
 * ky = (r + pad) mod stride + stride j, which see d out at i + (r + pad - ky) / stride. */
static void convolution_to_input(const Run *run, const Operation *op)
{
    View in = gradients(run->plan, op->in), out = gradients(run->plan, op->out);
    int32_t *offset = (int32_t *)run->workspace;
    float *packed = run->workspace + round_up(op->kernel_x * out.channels, GROUP);
    const int taps = op->kernel_y * op->kernel_x;
    for (int ry = 0; ry < smaller(op->stride_y, in.height); ry++) {
        for (int rx = 0; rx < smaller(op->stride_x, in.width); rx++) {
            const int ky = (ry + op->pad_y) % op->stride_y, kx = (rx + op->pad_x) % op->stride_x;
            View phase = in;
            phase.height = (in.height - ry + op->stride_y - 1) / op->stride_y;
            phase.width = (in.width - rx + op->stride_x - 1) / op->stride_x;
            phase.at += ry * in.row + rx * GROUP;
            phase.row = in.row * op->stride_y;
            Packing p = {
                .weight = run->model + op->weight, .outs = in.channels, .ins = out.channels,
                .out_stride = taps, .in_stride = (long)taps * in.channels,
                .y_first = ky, .y_step = op->stride_y, .kernel_y = larger(0, (op->kernel_y - ky + op->stride_y - 1) / op->stride_y),
                .x_first = kx, .x_step = op->stride_x, .kernel_x = larger(0, (op->kernel_x - kx + op->stride_x - 1) / op->stride_x),
                .width = op->kernel_x,
            };
            Correlation k = {
                .y_first = (ry + op->pad_y - ky) / op->stride_y, .y_pixel = 1, .y_tap = -1, .kernel_y = p.kernel_y,
                .x_first = (rx + op->pad_x - kx) / op->stride_x, .x_pixel = 1, .x_tap = -1, .kernel_x = p.kernel_x,
                .out_x = (long)GROUP * op->stride_x, .weight = packed, .offset = offset,
                .tile = best_tile(in.channels, phase.width), .add = op->to_input == 2,
            };
            tap_offsets(offset, p.kernel_x, -1, out.plane, out.channels);
            pack(&p, k.tile.a, packed);
            for (int g = 0; g < run->groups; g++) {
                k.in = out, k.out = phase;
                k.in.at += g * out.group, k.out.at += g * in.group;
                correlate(&k);
            }
        }
    }
}

/* Weights of all output channels in [o, o + channels) and taps in [k, k + taps), over some rows of output pixels of a group. */
static void add_weight_tile(const Operation *op, View in, View out, int g, int y, int rows, int o, int channels, int k, int taps,
                            const int32_t *offset, float *sum, long sum_channel)
{
    WeightTile t = {
        .gradient_channel = out.plane, .gradient_row = out.row, .offset = offset + k, .in_x = (long)op->stride_x * GROUP,
        .in_row = op->stride_y * in.row, .rows = rows, .width = out.width, .sum_channel = sum_channel,
    };
    for (int half = 0; half < HALVES; half++) {
        t.gradient = row_of(out, g, o, y) + half * LANES;
        t.in = row_of(in, g, 0, y * op->stride_y - op->pad_y) - (long)op->pad_x * GROUP + half * LANES;
        t.sum = sum + half * LANES;
        WEIGHT[channels][taps](&t);
    }
}

#define SMALL_IMAGE 256 /* pixels: so many rows of gradients stay in the first-level cache anyway */
#define BLOCK 56        /* pixels of a block of rows of a larger image */

/* d weight[o][d][ky][kx] = sum over groups, rows, pixels, then lanes. For large images, blocks of rows go by for all weights, whose
 * sums of lanes wait in the workspace; for small ones each tile of weights stays in registers for a whole image. The order of
 * each sum is the same. */
static void convolution_to_weights(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = gradients(run->plan, op->out);
    const int taps = taps_of(op, in.channels);
    int32_t *offset = (int32_t *)run->workspace;
    float *sum = run->workspace + round_up(taps, GROUP), *to = run->gradient + op->weight;
    const TileShape tile = best_tile(out.channels, taps);
    for (int d = 0, n = 0; d < in.channels; d++)
        for (int ky = 0; ky < op->kernel_y; ky++)
            for (int kx = 0; kx < op->kernel_x; kx++) offset[n++] = (int32_t)(d * in.plane + ky * in.row + kx * GROUP);
    const int small = out.height * out.width <= SMALL_IMAGE;
    const int rows = small ? out.height : larger(1, BLOCK / out.width);
    if (!small) memset(sum, 0, sizeof(float) * out.channels * taps * GROUP);
    for (int g = 0; g < (small ? 1 : run->groups); g++)
        for (int y = 0; y < out.height; y += rows)
            for (int o = 0; o < out.channels; o += tile.a)
                for (int k = 0; k < taps; k += tile.b) {
                    const int channels = smaller(tile.a, out.channels - o), width = smaller(tile.b, taps - k);
                    if (!small) {
                        add_weight_tile(op, in, out, g, y, smaller(rows, out.height - y), o, channels, k, width, offset,
                                        sum + ((long)o * taps + k) * GROUP, (long)taps * GROUP);
                        continue;
                    }
                    memset(sum, 0, sizeof(float) * channels * LARGEST * GROUP);
                    for (int each = 0; each < run->groups; each++)
                        add_weight_tile(op, in, out, each, 0, rows, o, channels, k, width, offset, sum, LARGEST * GROUP);
                    for (int i = 0; i < channels; i++)
                        for (int j = 0; j < width; j++)
                            to[(long)(o + i) * taps + k + j] = lane_sum(sum + (i * LARGEST + j) * GROUP);
                }
    if (!small)
        for (long n = 0; n < (long)out.channels * taps; n++) to[n] = lane_sum(sum + n * GROUP);
}

/* d bias[c]: rows of pixels lane by lane, then lanes. */
static void to_bias(const Run *run, const Operation *op)
{
    View out = gradients(run->plan, op->out);
    for (int c = 0; c < out.channels; c++) {
        float lanes[GROUP];
        for (int half = 0; half < HALVES; half++) {
            vec sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
            for (int g = 0; g < run->groups; g++)
                for (int y = 0; y < out.height; y++) {
                    const float *row = row_of(out, g, c, y) + half * LANES;
                    int x = 0;
                    for (; x + 4 <= out.width; x += 4)
                        UNROLL for (int i = 0; i < 4; i++) sum[i] = v_add(sum[i], v_load(row + (x + i) * GROUP));
                    for (; x < out.width; x++) sum[0] = v_add(sum[0], v_load(row + x * GROUP));
                }
            v_store(lanes + half * LANES, v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
        }
        run->gradient[op->bias + c] = lane_sum(lanes);
    }
}

/* --- linear: a channel is a feature, and the groups are the pixels -------------------------------------------------------- */

static void linear_offsets(int32_t *offset, int count)
{
    for (int i = 0; i < count; i++) offset[i] = i * GROUP;
}

/* Tiles over outputs x groups; `packed` weights where rows of the matrix are outputs, the matrix itself where columns are. */
static void linear_tiles(const Run *run, View in, View out, const float *weight, long weight_tap, int packed, const float *bias,
                         const int32_t *offset, TileShape tile, int add, int relu)
{
    ForwardTile t = {.in_x = in.group, .offset = offset, .last = in.channels, .rows = 1, .out_channel = out.plane,
                     .out_x = out.group, .add = add, .relu = relu};
    for (int g = 0; g < run->groups; g += tile.b) {
        const int groups = smaller(tile.b, run->groups - g);
        for (int o = 0; o < out.channels; o += tile.a) {
            const int outs = smaller(tile.a, out.channels - o);
            t.weight = packed ? weight + (long)o * in.channels : weight + o;
            t.weight_tap = packed ? outs : weight_tap;
            t.bias = bias ? bias + o : 0;
            for (int half = 0; half < HALVES; half++) {
                t.in = in.at + g * in.group + half * LANES;
                t.out = out.at + g * out.group + o * out.plane + half * LANES;
                FORWARD[outs][groups](&t);
            }
        }
    }
}

/* packed[tile][i][o] of the tile, from rows of the matrix. */
static void pack_rows(const float *weight, int outs, int ins, int tile, float *to)
{
    for (int o = 0; o < outs; o += tile) {
        const int rows = smaller(tile, outs - o);
        const float *from = weight + (long)o * ins;
        int i = 0;
        if (rows == 8)
            for (; i + 8 <= ins; i += 8, to += 64) {
                const float *in[8];
                for (int r = 0; r < 8; r++) in[r] = from + (long)r * ins + i;
                transpose_8x8(in, to, 8);
            }
        for (; i < ins; i++)
            for (int r = 0; r < rows; r++) *to++ = from[(long)r * ins + i];
    }
}

static void linear_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    int32_t *offset = (int32_t *)run->workspace;
    float *packed = run->workspace + round_up(in.channels, GROUP);
    const TileShape tile = best_tile(out.channels, run->groups);
    linear_offsets(offset, in.channels);
    pack_rows(run->model + op->weight, out.channels, in.channels, tile.a, packed);
    linear_tiles(run, in, out, packed, 0, 1, op->bias < 0 ? 0 : run->model + op->bias, offset, tile, 0, op->relu);
}

static void linear_to_input(const Run *run, const Operation *op)
{
    View in = gradients(run->plan, op->in), out = gradients(run->plan, op->out);
    int32_t *offset = (int32_t *)run->workspace;
    linear_offsets(offset, out.channels);
    linear_tiles(run, out, in, run->model + op->weight, in.channels, 0, 0, offset, best_tile(in.channels, run->groups),
                 op->to_input == 2, 0);
}

/* [feature][16] of every group as [sample][feature]; rows are `width` apart. */
static void by_sample(const Run *run, View v, float *to, int width)
{
    for (int g = 0; g < run->groups; g++, to += (long)GROUP * width) {
        const float *from = v.at + g * v.group;
        int i = 0;
        for (; i + 8 <= v.channels; i += 8)
            for (int half = 0; half < 2; half++) {
                const float *in[8];
                for (int r = 0; r < 8; r++) in[r] = from + (long)(i + r) * GROUP + half * 8;
                transpose_8x8(in, to + (long)half * 8 * width + i, width);
            }
        for (; i < v.channels; i++)
            for (int b = 0; b < GROUP; b++) to[(long)b * width + i] = from[(long)i * GROUP + b];
    }
}

/* d weight[o][i] = sum over samples, one after the other, of d out[sample][o] in[sample][i]: here registers run along i. */
static void linear_to_weights(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = gradients(run->plan, op->out);
    const int ins = in.channels, outs = out.channels, wide = round_up(ins, GROUP), high = round_up(outs, GROUP);
    int32_t *offset = (int32_t *)run->workspace;
    float *x = run->workspace + round_up(run->groups * GROUP, GROUP), *d = x + (long)run->groups * GROUP * wide;
    float *to = run->gradient + op->weight, edge[LARGEST * LARGEST * LANES];
    by_sample(run, in, x, wide);
    by_sample(run, out, d, high);
    for (int b = 0; b < run->batch; b++) offset[b] = b * wide;
    const int whole = ins / LANES; /* registers; what is left is computed beside and copied */
    const TileShape tile = best_tile(outs, larger(whole, 1));
    ForwardTile t = {.in_x = LANES, .offset = offset, .last = run->batch, .rows = 1, .weight_tap = high, .out_x = LANES};
    for (int i = 0; i < whole; i += tile.b) {
        const int columns = smaller(tile.b, whole - i);
        for (int o = 0; o < outs; o += tile.a) {
            t.in = x + (long)i * LANES, t.weight = d + o;
            t.out = to + (long)o * ins + (long)i * LANES, t.out_channel = ins;
            FORWARD[smaller(tile.a, outs - o)][columns](&t);
        }
    }
    for (int o = 0; whole * LANES < ins && o < outs; o += LARGEST) {
        const int rows = smaller(LARGEST, outs - o);
        t.in = x + (long)whole * LANES, t.weight = d + o, t.out = edge, t.out_channel = LANES;
        FORWARD[rows][1](&t);
        for (int r = 0; r < rows; r++)
            memcpy(to + (long)(o + r) * ins + (long)whole * LANES, edge + r * LANES, sizeof(float) * (ins - whole * LANES));
    }
}

/* --- memory they need ------------------------------------------------------------------------------------------------------- */

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t workspace_of(const Plan *plan, const Operation *op)
{
    const Tensor *in = plan->tensors + op->in, *out = plan->tensors + op->out;
    if (op->kind == CONVOLUTION) {
        const int64_t taps = taps_of(op, in->channels);
        const int64_t packed = round_up(op->kernel_x * most(in->channels, out->channels), GROUP) + taps * out->channels;
        const int small = out->height * out->width <= SMALL_IMAGE;
        const int64_t sums = small ? LARGEST * LARGEST * GROUP : taps * out->channels * GROUP;
        return most(packed, round_up(taps, GROUP) + sums);
    }
    if (op->kind == LINEAR) {
        const int64_t packed = round_up(most(in->channels, out->channels), GROUP) + (int64_t)in->channels * out->channels;
        const int64_t samples = (int64_t)plan->groups * GROUP;
        return most(packed, samples * (1 + round_up(in->channels, GROUP) + round_up(out->channels, GROUP)));
    }
    return 0;
}

#endif
