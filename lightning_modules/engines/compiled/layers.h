/* Pools, ReLU, sums and normalisations. Each gradient is set (`to_input` 1) or added to what another reader left there (2). */
#ifndef ARCHIPELAGO_LAYERS_H
#define ARCHIPELAGO_LAYERS_H

#include "contract.h"

ALWAYS_INLINE void put(float *to, vec value, int how) { v_store(to, how == 2 ? v_add(v_load(to), value) : value); }

/* --- element by element ------------------------------------------------------------------------------------------------------- */

/* The gradient of a tensor that went through max(0, .): nothing where the result was not above 0. In place. */
static void relu_backward(const Run *run, int tensor)
{
    View y_ = values(run->plan, tensor), d_ = gradients(run->plan, tensor);
    FOR_ROWS(run, y_) {
        const float *v = row_of(y_, g, c, y);
        float *d = row_of(d_, g, c, y);
        FOR_LANES(y_.width, i) v_store(d + i, v_select(m_greater(v_load(v + i), v_zero()), v_load(d + i), v_zero()));
    }
}

static void relu_forward(const Run *run, const Operation *op)
{
    View a = values(run->plan, op->in), out = values(run->plan, op->out);
    FOR_ROWS(run, out) {
        const float *from = row_of(a, g, c, y);
        float *to = row_of(out, g, c, y);
        FOR_LANES(out.width, i) v_store(to + i, v_relu(v_load(from + i)));
    }
}

static void add_forward(const Run *run, const Operation *op)
{
    View a = values(run->plan, op->in), b = values(run->plan, op->second), out = values(run->plan, op->out);
    FOR_ROWS(run, out) {
        const float *p = row_of(a, g, c, y), *q = row_of(b, g, c, y);
        float *to = row_of(out, g, c, y);
        FOR_LANES(out.width, i)
        {
            vec sum = v_add(v_load(p + i), v_load(q + i));
            v_store(to + i, op->relu ? v_relu(sum) : sum);
        }
    }
}

/* d from := (or +=) d out, of equal shapes: a sum's gradient goes to both of its terms. */
static void pass_gradient(const Run *run, int from, int to, int how)
{
    View d = gradients(run->plan, from), in = gradients(run->plan, to);
    if (how) FOR_ROWS(run, in) {
        const float *p = row_of(d, g, c, y);
        float *q = row_of(in, g, c, y);
        FOR_LANES(in.width, i) put(q + i, v_load(p + i), how);
    }
}

/* Channels x height x width as features: the same values without their halo. */
static void copy_flat(const Run *run, View image, View flat, int to_image, int how)
{
    FOR_ROWS(run, image) {
        float *p = row_of(image, g, c, y), *q = flat.at + g * flat.group + (long)(c * image.height + y) * image.width * GROUP;
        FOR_LANES(image.width, i)
        {
            if (to_image) put(p + i, v_load(q + i), how);
            else v_store(q + i, v_load(p + i));
        }
    }
}

/* --- pools ---------------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int top, bottom, left, right; /* the window, clipped to the image */
    int size;                     /* of the window clipped to the padded image, as torch counts it */
} Window;

static Window window_of(const Operation *op, int height, int width, int y, int x)
{
    Window w;
    int y0 = y * op->stride_y - op->pad_y, x0 = x * op->stride_x - op->pad_x;
    int y1 = smaller(y0 + op->kernel_y, height + op->pad_y), x1 = smaller(x0 + op->kernel_x, width + op->pad_x);
    w.size = (y1 - y0) * (x1 - x0);
    w.top = larger(y0, 0), w.left = larger(x0, 0), w.bottom = smaller(y1, height), w.right = smaller(x1, width);
    return w;
}

/* The largest of each window and (kept, as a float) which of its pixels that was: the first of equal ones, as torch has it. */
static void max_pool_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    float *kept = run->plan->arena + op->kept;
    FOR_ROWS(run, out) {
        float *to = row_of(out, g, c, y), *which = kept + ((long)(g * out.channels + c) * out.height + y) * out.width * GROUP;
        for (int x = 0; x < out.width; x++) {
            const Window w = window_of(op, in.height, in.width, y, x);
            for (int half = 0; half < HALVES; half++) {
                const float *p = row_of(in, g, c, 0) + half * LANES;
                vec best = v_load(p + w.top * in.row + w.left * GROUP), at = v_zero();
                int number = 0;
                for (int i = w.top; i < w.bottom; i++)
                    for (int j = w.left; j < w.right; j++, number++) {
                        vec value = v_load(p + i * in.row + j * GROUP);
                        mask more = m_or(m_greater(value, best), m_nan(value));
                        best = v_select(more, value, best);
                        at = v_select(more, v_all((float)number), at);
                    }
                const long i = (long)x * GROUP + half * LANES;
                v_store(to + i, op->relu ? v_relu(best) : best);
                if (run->training) v_store(which + i, at);
            }
        }
    }
}

/* Whether windows neither overlap nor leave a pixel out: then each pixel's gradient is set once. */
static int covers(const Operation *op, View in, View out)
{
    return op->kernel_y == op->stride_y && op->kernel_x == op->stride_x && !op->pad_y && !op->pad_x &&
           out.height * op->stride_y >= in.height && out.width * op->stride_x >= in.width;
}

static void clear(const Run *run, View v)
{
    FOR_ROWS(run, v) memset(row_of(v, g, c, y), 0, sizeof(float) * v.width * GROUP);
}

static void max_pool_backward(const Run *run, const Operation *op)
{
    View in = gradients(run->plan, op->in), out = gradients(run->plan, op->out);
    const float *kept = run->plan->arena + op->kept;
    int how = op->to_input;
    if (how == 1 && !covers(op, in, out)) clear(run, in), how = 2;
    FOR_ROWS(run, out) {
        const float *d = row_of(out, g, c, y);
        const float *which = kept + ((long)(g * out.channels + c) * out.height + y) * out.width * GROUP;
        for (int x = 0; x < out.width; x++) {
            const Window w = window_of(op, in.height, in.width, y, x);
            for (int half = 0; half < HALVES; half++) {
                const long at = (long)x * GROUP + half * LANES;
                const vec slope = v_load(d + at), chosen = v_load(which + at);
                float *p = row_of(in, g, c, 0) + half * LANES;
                int number = 0;
                for (int i = w.top; i < w.bottom; i++)
                    for (int j = w.left; j < w.right; j++, number++) {
                        mask here = m_equal(chosen, v_all((float)number));
                        put(p + i * in.row + j * GROUP, v_select(here, slope, v_zero()), how);
                    }
            }
        }
    }
}

static void average_pool_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    FOR_ROWS(run, out) {
        float *to = row_of(out, g, c, y);
        for (int x = 0; x < out.width; x++) {
            const Window w = window_of(op, in.height, in.width, y, x);
            const float count = (float)(op->count_padding ? w.size : (w.bottom - w.top) * (w.right - w.left));
            for (int half = 0; half < HALVES; half++) {
                const float *p = row_of(in, g, c, 0) + half * LANES;
                vec sum = v_zero();
                for (int i = w.top; i < w.bottom; i++)
                    for (int j = w.left; j < w.right; j++) sum = v_add(sum, v_load(p + i * in.row + j * GROUP));
                sum = v_div(sum, v_all(count));
                v_store(to + (long)x * GROUP + half * LANES, op->relu ? v_relu(sum) : sum);
            }
        }
    }
}

static void average_pool_backward(const Run *run, const Operation *op)
{
    View in = gradients(run->plan, op->in), out = gradients(run->plan, op->out);
    if (op->to_input == 1) clear(run, in);
    FOR_ROWS(run, out) {
        const float *d = row_of(out, g, c, y);
        for (int x = 0; x < out.width; x++) {
            const Window w = window_of(op, in.height, in.width, y, x);
            const float count = (float)(op->count_padding ? w.size : (w.bottom - w.top) * (w.right - w.left));
            for (int half = 0; half < HALVES; half++) {
                const vec share = v_div(v_load(d + (long)x * GROUP + half * LANES), v_all(count));
                float *p = row_of(in, g, c, 0) + half * LANES;
                for (int i = w.top; i < w.bottom; i++)
                    for (int j = w.left; j < w.right; j++) put(p + i * in.row + j * GROUP, share, 2);
            }
        }
    }
}

/* --- batch normalisation ------------------------------------------------------------------------------------------------------ */

enum { VALUES, SQUARES, SLOPES };

/* What one pixel adds to the sums of its channel: its value, its squared distance from the mean, or (of a gradient d and the
 * input x there) d and d xhat. */
ALWAYS_INLINE void add_pixel(const int what, const float *p, const float *q, vec mean, vec inverse, mask live, vec sums[2])
{
    const vec a = v_load(p), away = v_sub(v_load(q), mean);
    if (what == SQUARES) sums[0] = v_add(sums[0], v_select(live, v_mul(away, away), v_zero()));
    else sums[0] = v_add(sums[0], v_select(live, a, v_zero()));
    if (what == SLOPES) sums[1] = v_add(sums[1], v_select(live, v_mul(a, v_mul(away, inverse)), v_zero()));
}

/* Sums over a channel of the batch, live lanes only: even and odd pixels of all rows lane by lane, then together, then lanes. */
ALWAYS_INLINE void channel_sums(const int what, const Run *run, View a, View b, int channel, vec mean, vec inverse, float total[2])
{
    float lanes[2][GROUP];
    for (int half = 0; half < HALVES; half++) {
        vec even[2] = {v_zero(), v_zero()}, odd[2] = {v_zero(), v_zero()};
        for (int g = 0; g < run->groups; g++) {
            const mask live = m_below(live_lanes(run, g), half);
            for (int y = 0; y < a.height; y++) {
                const float *p = row_of(a, g, channel, y) + half * LANES, *q = row_of(b, g, channel, y) + half * LANES;
                int x = 0;
                for (; x + 2 <= a.width; x += 2, p += 2 * GROUP, q += 2 * GROUP) {
                    add_pixel(what, p, q, mean, inverse, live, even);
                    add_pixel(what, p + GROUP, q + GROUP, mean, inverse, live, odd);
                }
                if (x < a.width) add_pixel(what, p, q, mean, inverse, live, even);
            }
        }
        for (int i = 0; i < 2; i++) v_store(lanes[i] + half * LANES, v_add(even[i], odd[i]));
    }
    total[0] = lane_sum(lanes[0]), total[1] = what == SLOPES ? lane_sum(lanes[1]) : 0;
}

ALWAYS_INLINE float model_or(const Run *run, int64_t at, int c, float otherwise) { return at < 0 ? otherwise : run->model[at + c]; }

/* Kept: mean and 1 / standard deviation of each channel. */
static void batch_norm_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    float *kept = run->plan->arena + op->kept;
    const float count = (float)run->batch * in.height * in.width;
    for (int c = 0; c < in.channels; c++) {
        float *mean_ = run->model + op->mean + c, *variance_ = run->model + op->variance + c;
        float mean = *mean_, variance = *variance_, sums[2];
        if (run->training) {
            channel_sums(VALUES, run, in, in, c, v_zero(), v_zero(), sums);
            mean = sums[0] / count;
            channel_sums(SQUARES, run, in, in, c, v_all(mean), v_zero(), sums);
            variance = sums[0];
            *mean_ = (1 - op->momentum) * *mean_ + op->momentum * mean;
            *variance_ = (1 - op->momentum) * *variance_ + op->momentum * (variance / (count - 1));
            variance /= count;
        }
        const float inverse = 1.0f / __builtin_sqrtf(variance + op->epsilon);
        kept[2 * c] = mean, kept[2 * c + 1] = inverse;
        const float slope = model_or(run, op->weight, c, 1.0f) * inverse;
        const vec scale = v_all(slope), shift = v_all(model_or(run, op->bias, c, 0.0f) - mean * slope);
        for (int g = 0; g < run->groups; g++)
            for (int y = 0; y < in.height; y++) {
                const float *p = row_of(in, g, c, y);
                float *q = row_of(out, g, c, y);
                FOR_LANES(in.width, i)
                {
                    vec value = v_fma(v_load(p + i), scale, shift);
                    v_store(q + i, op->relu ? v_relu(value) : value);
                }
            }
    }
}

/* d in = weight / s (d - mean(d) - xhat mean(d xhat)), xhat = (x - mean) / s; lanes without a sample stay without a gradient. */
static void batch_norm_backward(const Run *run, const Operation *op)
{
    View x_ = values(run->plan, op->in), out = gradients(run->plan, op->out);
    const float *kept = run->plan->arena + op->kept;
    const float count = (float)run->batch * out.height * out.width;
    for (int c = 0; c < out.channels; c++) {
        float sums[2];
        const vec mean = v_all(kept[2 * c]), inverse = v_all(kept[2 * c + 1]);
        channel_sums(SLOPES, run, out, x_, c, mean, inverse, sums);
        const float total = sums[0], moment = sums[1];
        if (op->weight >= 0) run->gradient[op->weight + c] = moment;
        if (op->bias >= 0) run->gradient[op->bias + c] = total;
        if (!op->to_input) continue;
        View in = gradients(run->plan, op->in);
        const vec scale = v_all(model_or(run, op->weight, c, 1.0f) * kept[2 * c + 1]);
        const vec share = v_all(total / count), lean = v_all(moment / count);
        for (int g = 0; g < run->groups; g++)
            for (int y = 0; y < out.height; y++) {
                const float *d = row_of(out, g, c, y), *v = row_of(x_, g, c, y);
                float *to = row_of(in, g, c, y);
                FOR_LANES(out.width, i)
                {
                    const mask live = m_below(live_lanes(run, g), (int)(i % GROUP) / LANES);
                    vec hat = v_mul(v_sub(v_load(v + i), mean), inverse);
                    vec value = v_sub(v_sub(v_load(d + i), share), v_mul(hat, lean));
                    put(to + i, v_select(live, v_mul(scale, value), v_zero()), op->to_input);
                }
            }
    }
}

/* --- group normalisation: every sample by itself -------------------------------------------------------------------------------- */

/* Pixels of the channels [first, first + size) of a group of samples, one register at a time. */
#define FOR_PIXELS(v, first, size) \
    for (int c = (first); c < (first) + (size); c++) \
        for (int y = 0; y < (v).height; y++) \
            for (int x = 0; x < (v).width; x++)
#define PIXEL(v) (row_of(v, g, c, y) + (long)x * GROUP + half * LANES)

/* Kept: mean and 1 / standard deviation of each (group of samples, group of channels), lane by lane. */
static void group_norm_forward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = values(run->plan, op->out);
    const int size = in.channels / op->norm_groups;
    const vec count = v_all((float)size * in.height * in.width);
    for (int g = 0; g < run->groups; g++)
        for (int part = 0; part < op->norm_groups; part++)
            for (int half = 0; half < HALVES; half++) {
                float *kept = run->plan->arena + op->kept + (long)(g * op->norm_groups + part) * 2 * GROUP + half * LANES;
                vec mean = v_zero(), variance = v_zero();
                FOR_PIXELS(in, part * size, size) mean = v_add(mean, v_load(PIXEL(in)));
                mean = v_div(mean, count);
                FOR_PIXELS(in, part * size, size)
                {
                    vec away = v_sub(v_load(PIXEL(in)), mean);
                    variance = v_fma(away, away, variance);
                }
                vec inverse = v_div(v_all(1.0f), v_sqrt(v_add(v_div(variance, count), v_all(op->epsilon))));
                v_store(kept, mean), v_store(kept + GROUP, inverse);
                FOR_PIXELS(in, part * size, size)
                {
                    vec hat = v_mul(v_sub(v_load(PIXEL(in)), mean), inverse);
                    vec value = v_fma(hat, v_all(model_or(run, op->weight, c, 1.0f)), v_all(model_or(run, op->bias, c, 0.0f)));
                    v_store(PIXEL(out), op->relu ? v_relu(value) : value);
                }
            }
}

static void group_norm_to_parameters(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = gradients(run->plan, op->out);
    const int size = in.channels / op->norm_groups;
    for (int c = 0; c < in.channels; c++) {
        float lanes[2][GROUP];
        for (int half = 0; half < HALVES; half++) {
            vec total = v_zero(), moment = v_zero();
            for (int g = 0; g < run->groups; g++) {
                const float *kept =
                    run->plan->arena + op->kept + (long)(g * op->norm_groups + c / size) * 2 * GROUP + half * LANES;
                const vec mean = v_load(kept), inverse = v_load(kept + GROUP);
                for (int y = 0; y < in.height; y++)
                    for (int x = 0; x < in.width; x++) {
                        vec d = v_load(PIXEL(out)), hat = v_mul(v_sub(v_load(PIXEL(in)), mean), inverse);
                        total = v_add(total, d), moment = v_fma(d, hat, moment);
                    }
            }
            v_store(lanes[0] + half * LANES, total), v_store(lanes[1] + half * LANES, moment);
        }
        if (op->bias >= 0) run->gradient[op->bias + c] = lane_sum(lanes[0]);
        if (op->weight >= 0) run->gradient[op->weight + c] = lane_sum(lanes[1]);
    }
}

static void group_norm_backward(const Run *run, const Operation *op)
{
    View in = values(run->plan, op->in), out = gradients(run->plan, op->out);
    const int size = in.channels / op->norm_groups;
    const vec count = v_all((float)size * in.height * in.width);
    group_norm_to_parameters(run, op);
    if (!op->to_input) return;
    View to = gradients(run->plan, op->in);
    for (int g = 0; g < run->groups; g++)
        for (int part = 0; part < op->norm_groups; part++)
            for (int half = 0; half < HALVES; half++) {
                const float *kept = run->plan->arena + op->kept + (long)(g * op->norm_groups + part) * 2 * GROUP + half * LANES;
                const vec mean = v_load(kept), inverse = v_load(kept + GROUP);
                vec total = v_zero(), moment = v_zero();
                FOR_PIXELS(in, part * size, size)
                {
                    vec d = v_mul(v_load(PIXEL(out)), v_all(model_or(run, op->weight, c, 1.0f)));
                    vec hat = v_mul(v_sub(v_load(PIXEL(in)), mean), inverse);
                    total = v_add(total, d), moment = v_fma(d, hat, moment);
                }
                total = v_div(total, count), moment = v_div(moment, count);
                FOR_PIXELS(in, part * size, size)
                {
                    vec d = v_mul(v_load(PIXEL(out)), v_all(model_or(run, op->weight, c, 1.0f)));
                    vec hat = v_mul(v_sub(v_load(PIXEL(in)), mean), inverse);
                    put(PIXEL(to), v_mul(inverse, v_sub(v_sub(d, total), v_mul(hat, moment))), op->to_input);
                }
            }
}

#endif
