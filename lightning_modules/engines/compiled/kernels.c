/* Training steps and forward passes of small networks on one core: what Python calls.
 *
 * A plan (plan.h) lists the operations of a network; shapes are values, so that one library serves all networks. Files:
 * lanes.h (registers), plan.h (tensors), tiles.h (inner loops), contract.h (convolutions, linear), layers.h (the rest).
 * Compiled with -ffp-contract=off and without -ffast-math: see lanes.h for why bits are the same on every machine.
 */
#include "layers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define EXPORT __attribute__((visibility("default")))

EXPORT int kernels_lanes(void) { return LANES; }

/* --- are the shapes right? ---------------------------------------------------------------------------------------------------- */

enum { FINE, BAD_TENSOR, BAD_KIND, BAD_REFERENCE, BAD_SHAPE, BAD_MEMORY, BAD_PARAMETER, BAD_HALO, BAD_OUTPUT };

static int64_t floats_of(const Tensor *t, int halo_y, int halo_x, int groups)
{
    return (int64_t)groups * t->channels * (t->height + 2 * halo_y) * (t->width + 2 * halo_x) * GROUP;
}

static int inside(int64_t start, int64_t size, int64_t whole) { return start >= 0 && size >= 0 && start <= whole - size; }

static int64_t kept_floats(const Plan *plan, const Operation *op)
{
    const Tensor *out = plan->tensors + op->out;
    if (op->kind == MAX_POOL) return floats_of(out, 0, 0, plan->groups);
    if (op->kind == BATCH_NORM) return 2 * (int64_t)out->channels;
    if (op->kind == GROUP_NORM) return (int64_t)plan->groups * op->norm_groups * 2 * GROUP;
    return 0;
}

static int check_tensor(const Plan *plan, const Tensor *t)
{
    if (t->channels < 1 || t->height < 1 || t->width < 1 || t->halo_y < 0 || t->halo_x < 0 || t->gradient_halo_y < 0 ||
        t->gradient_halo_x < 0)
        return BAD_TENSOR;
    if (t->channels > 1 << 24 || t->height > 1 << 14 || t->width > 1 << 14 || t->halo_y > 1 << 10 || t->halo_x > 1 << 10 ||
        t->gradient_halo_y > 1 << 10 || t->gradient_halo_x > 1 << 10)
        return BAD_TENSOR;
    /* Offsets inside a group are 32-bit. */
    if (floats_of(t, t->halo_y, t->halo_x, 1) > INT32_MAX || floats_of(t, t->gradient_halo_y, t->gradient_halo_x, 1) > INT32_MAX)
        return BAD_TENSOR;
    if (!inside(t->value, floats_of(t, t->halo_y, t->halo_x, plan->groups), plan->arena_size)) return BAD_MEMORY;
    if (t->gradient >= 0 &&
        !inside(t->gradient, floats_of(t, t->gradient_halo_y, t->gradient_halo_x, plan->groups), plan->arena_size))
        return BAD_MEMORY;
    return FINE;
}

/* Two tensors are the same memory, as an image and its flat view are, or have nothing in common. */
static int apart(int64_t a, int64_t a_size, int64_t b, int64_t b_size)
{
    return a < 0 || b < 0 || (a == b && a_size == b_size) || a + a_size <= b || b + b_size <= a;
}

static int check_overlap(const Plan *plan, const Tensor *a, const Tensor *b)
{
    const int64_t values[2] = {floats_of(a, a->halo_y, a->halo_x, plan->groups), floats_of(b, b->halo_y, b->halo_x, plan->groups)};
    const int64_t slopes[2] = {floats_of(a, a->gradient_halo_y, a->gradient_halo_x, plan->groups),
                               floats_of(b, b->gradient_halo_y, b->gradient_halo_x, plan->groups)};
    return apart(a->value, values[0], b->value, values[1]) && apart(a->gradient, slopes[0], b->gradient, slopes[1]) &&
                   apart(a->value, values[0], b->gradient, slopes[1]) && apart(a->gradient, slopes[0], b->value, values[1])
               ? FINE
               : BAD_MEMORY;
}

static int same_shape(const Tensor *a, const Tensor *b)
{
    return a->channels == b->channels && a->height == b->height && a->width == b->width;
}

static int check_window(const Operation *op)
{
    return op->kernel_y >= 1 && op->kernel_x >= 1 && op->stride_y >= 1 && op->stride_x >= 1 && op->pad_y >= 0 && op->pad_x >= 0 &&
           op->kernel_y <= 1 << 10 && op->kernel_x <= 1 << 10 && op->stride_y <= 1 << 10 && op->stride_x <= 1 << 10 &&
           op->pad_y <= 1 << 10 && op->pad_x <= 1 << 10;
}

static int check_convolution(const Operation *op, const Tensor *in, const Tensor *out)
{
    if (!check_window(op)) return BAD_SHAPE;
    const int spare_y = in->height + 2 * op->pad_y - op->kernel_y, spare_x = in->width + 2 * op->pad_x - op->kernel_x;
    if (spare_y < 0 || spare_x < 0 || out->height != spare_y / op->stride_y + 1 || out->width != spare_x / op->stride_x + 1)
        return BAD_SHAPE;
    if (in->halo_y < op->pad_y || in->halo_x < op->pad_x) return BAD_HALO;
    if (!op->to_input) return FINE;
    /* The backward pass looks at d out from ceil((pad - kernel + 1) / stride) to floor((size - 1 + pad) / stride). */
    const int above = (op->kernel_y - 1 - op->pad_y) / op->stride_y, left = (op->kernel_x - 1 - op->pad_x) / op->stride_x;
    const int below = (in->height - 1 + op->pad_y) / op->stride_y - (out->height - 1);
    const int right = (in->width - 1 + op->pad_x) / op->stride_x - (out->width - 1);
    return out->gradient_halo_y < larger(above, below) || out->gradient_halo_x < larger(left, right) ? BAD_HALO : FINE;
}

/* Every window begins inside the padded image, and no window is empty. */
static int check_pool(const Operation *op, const Tensor *in, const Tensor *out)
{
    if (!check_window(op) || in->channels != out->channels) return BAD_SHAPE;
    if (op->pad_y >= op->kernel_y || op->pad_x >= op->kernel_x) return BAD_SHAPE;
    const int last_y = (out->height - 1) * op->stride_y - op->pad_y, last_x = (out->width - 1) * op->stride_x - op->pad_x;
    return last_y >= in->height || last_x >= in->width ? BAD_SHAPE : FINE;
}

static int check_shapes(const Operation *op, const Tensor *in, const Tensor *second, const Tensor *out)
{
    switch (op->kind) {
    case CONVOLUTION: return check_convolution(op, in, out);
    case LINEAR:
        if (in->height != 1 || in->width != 1 || out->height != 1 || out->width != 1) return BAD_SHAPE;
        return in->halo_y | in->halo_x | out->gradient_halo_y | out->gradient_halo_x | out->halo_y | out->halo_x |
                       (op->to_input ? in->gradient_halo_y | in->gradient_halo_x : 0)
                   ? BAD_HALO
                   : FINE;
    case MAX_POOL:
    case AVERAGE_POOL: return check_pool(op, in, out);
    case ADD: return same_shape(in, out) && same_shape(second, out) ? FINE : BAD_SHAPE;
    case COPY:
        if (out->height != 1 || out->width != 1 || out->channels != in->channels * in->height * in->width) return BAD_SHAPE;
        return out->halo_y | out->halo_x | out->gradient_halo_y | out->gradient_halo_x ? BAD_HALO : FINE;
    case GROUP_NORM:
        if (op->norm_groups < 1 || in->channels % op->norm_groups) return BAD_SHAPE;
        return same_shape(in, out) ? FINE : BAD_SHAPE;
    default: return same_shape(in, out) ? FINE : BAD_SHAPE;
    }
}

static int check_parameters(const Plan *plan, const Operation *op, const Tensor *in, const Tensor *out)
{
    const int weighs = op->kind == CONVOLUTION || op->kind == LINEAR, norm = op->kind == BATCH_NORM || op->kind == GROUP_NORM;
    int64_t weights = out->channels;
    if (op->kind == CONVOLUTION) weights = (int64_t)out->channels * in->channels * op->kernel_y * op->kernel_x;
    if (op->kind == LINEAR) weights = (int64_t)out->channels * in->channels;
    if ((weighs || op->weight >= 0) && !inside(op->weight, weights, plan->model_size)) return BAD_PARAMETER;
    if (op->bias >= 0 && !inside(op->bias, out->channels, plan->model_size)) return BAD_PARAMETER;
    if (!weighs && !norm && (op->weight >= 0 || op->bias >= 0)) return BAD_PARAMETER;
    if (op->kind == BATCH_NORM &&
        (!inside(op->mean, out->channels, plan->model_size) || !inside(op->variance, out->channels, plan->model_size)))
        return BAD_PARAMETER;
    return FINE;
}

static int check_operation(const Plan *plan, const Operation *op)
{
    if (op->kind < 0 || op->kind >= KINDS) return BAD_KIND;
    const int count = plan->tensor_count;
    if (op->in < 0 || op->in >= count || op->out < 0 || op->out >= count || op->in == op->out) return BAD_REFERENCE;
    if (op->kind == ADD && (op->second < 0 || op->second >= count || op->second == op->out)) return BAD_REFERENCE;
    const Tensor *in = plan->tensors + op->in, *out = plan->tensors + op->out;
    const Tensor *second = op->kind == ADD ? plan->tensors + op->second : in;
    if ((op->to_input && (in->gradient < 0 || out->gradient < 0)) || (op->to_second && second->gradient < 0)) return BAD_REFERENCE;
    int problem = check_shapes(op, in, second, out);
    if (!problem) problem = check_parameters(plan, op, in, out);
    if (!problem && (op->kept_size < kept_floats(plan, op) || !inside(op->kept, op->kept_size, plan->arena_size))) problem = BAD_MEMORY;
    if (!problem && workspace_of(plan, op) > plan->workspace_size) problem = BAD_MEMORY;
    return problem;
}

/* 0, or problem + 256 * (1 + number of the tensor or operation). Nothing is run before this said 0. */
EXPORT int64_t kernels_check(const Plan *plan)
{
    if (plan->groups < 1 || plan->groups > 1 << 16 || plan->tensor_count < 1 || plan->operation_count < 0) return BAD_MEMORY;
    if (!inside(plan->workspace, plan->workspace_size, plan->arena_size)) return BAD_MEMORY;
    for (int i = 0; i < plan->tensor_count; i++) {
        int problem = check_tensor(plan, plan->tensors + i);
        for (int j = 0; j < i && !problem; j++) problem = check_overlap(plan, plan->tensors + j, plan->tensors + i);
        if (problem) return problem + 256 * (int64_t)(i + 1);
    }
    for (int i = 0; i < plan->operation_count; i++) {
        int problem = check_operation(plan, plan->operations + i);
        if (problem) return problem + 256 * (int64_t)(i + 1);
    }
    if (plan->output < 0 || plan->output >= plan->tensor_count) return BAD_OUTPUT;
    const Tensor *out = plan->tensors + plan->output;
    return out->height != 1 || out->width != 1 || out->halo_y || out->halo_x ? BAD_OUTPUT : FINE;
}

/* Floats that an operation keeps for its backward pass, and that it needs while it runs. */
EXPORT int64_t kernels_kept(const Plan *plan, int operation) { return kept_floats(plan, plan->operations + operation); }
EXPORT int64_t kernels_workspace(const Plan *plan, int operation) { return workspace_of(plan, plan->operations + operation); }

/* In a build with AddressSanitizer: forbid (or allow again) the gaps that Python leaves between tensors. */
EXPORT void kernels_forbid(float *start, int64_t floats, int forbidden)
{
#if defined(__SANITIZE_ADDRESS__)
    if (forbidden) __asan_poison_memory_region(start, sizeof(float) * floats);
    else __asan_unpoison_memory_region(start, sizeof(float) * floats);
#else
    (void)start, (void)floats, (void)forbidden;
#endif
}

/* --- samples into lanes --------------------------------------------------------------------------------------------------------- */

/* Sixteen rows of sixteen bytes, transposed. */
static void transpose_bytes(const uint8_t *const rows[GROUP], long at, __m128i out[GROUP])
{
    __m128i a[GROUP], b[GROUP];
    for (int i = 0; i < GROUP; i++) a[i] = _mm_loadu_si128((const __m128i *)(rows[i] + at));
    for (int round = 0; round < 4; round++) { /* each interleaves row i with row i + 8: after four, bits of the index have turned */
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        for (int i = 0; i < GROUP; i++) a[i] = b[i];
    }
    for (int i = 0; i < GROUP; i++) out[i] = a[i];
}

/* What Samples does to raw values, in the same IEEE operations: bytes / 255, then (x - mean) / deviation. */
ALWAYS_INLINE vec normalised(vec x, const float *mean, const float *deviation, long j)
{
    return mean ? v_div(v_sub(x, v_all(mean[j])), v_all(deviation[j])) : x;
}

/* Rows of bytes (`size` of them, `index` says which rows) to lanes: value j of a row goes to where[j] of its group. `mean` and
 * `deviation` are given for each j, or NULL. Lanes without a sample are 0. */
EXPORT void kernels_gather_bytes(const uint8_t *data, int64_t size, const int64_t *index, int batch, const int32_t *where,
                                 const float *mean, const float *deviation, float *to, int64_t group)
{
    for (int start = 0; start < batch; start += GROUP, to += group) {
        const int count = smaller(GROUP, batch - start);
        const uint8_t *rows[GROUP];
        for (int b = 0; b < GROUP; b++) rows[b] = data + index[start + (b < count ? b : 0)] * size;
        int64_t j = 0;
        for (; j + GROUP <= size; j += GROUP) {
            __m128i bytes[GROUP];
            transpose_bytes(rows, j, bytes);
            for (int i = 0; i < GROUP; i++)
                for (int half = 0; half < HALVES; half++) {
                    vec x = v_div(v_from_bytes(bytes[i], half), v_all(255.0f));
                    x = v_select(m_below(count, half), normalised(x, mean, deviation, j + i), v_zero());
                    v_store(to + where[j + i] + half * LANES, x);
                }
        }
        for (; j < size; j++)
            for (int b = 0; b < GROUP; b++) {
                float x = (float)rows[b][j] / 255.0f;
                if (mean) x = (x - mean[j]) / deviation[j];
                to[where[j] + b] = b < count ? x : 0.0f;
            }
    }
}

/* The same for rows of floats, which are not divided by 255. */
EXPORT void kernels_gather_floats(const float *data, int64_t size, const int64_t *index, int batch, const int32_t *where,
                                  const float *mean, const float *deviation, float *to, int64_t group)
{
    for (int start = 0; start < batch; start += GROUP, to += group) {
        const int count = smaller(GROUP, batch - start);
        const float *rows[GROUP];
        for (int b = 0; b < GROUP; b++) rows[b] = data + index[start + (b < count ? b : 0)] * size;
        int64_t j = 0;
        for (; j + 8 <= size; j += 8) {
            float block[8 * GROUP];
            for (int half = 0; half < 2; half++) {
                const float *in[8];
                for (int b = 0; b < 8; b++) in[b] = rows[half * 8 + b] + j;
                transpose_8x8(in, block + half * 8, GROUP);
            }
            for (int i = 0; i < 8; i++)
                for (int half = 0; half < HALVES; half++) {
                    vec x = normalised(v_load(block + i * GROUP + half * LANES), mean, deviation, j + i);
                    v_store(to + where[j + i] + half * LANES, v_select(m_below(count, half), x, v_zero()));
                }
        }
        for (; j < size; j++)
            for (int b = 0; b < GROUP; b++) {
                float x = rows[b][j];
                if (mean) x = (x - mean[j]) / deviation[j];
                to[where[j] + b] = b < count ? x : 0.0f;
            }
    }
}

/* --- passes --------------------------------------------------------------------------------------------------------------------- */

static Run run_of(const Plan *plan, float *model, float *gradient, int batch, int training)
{
    Run run = {plan, model, gradient, plan->arena + plan->workspace, batch, (batch + GROUP - 1) / GROUP, training};
    return run;
}

static void forward(const Run *run, const Operation *op)
{
    switch (op->kind) {
    case CONVOLUTION: convolution_forward(run, op); break;
    case LINEAR: linear_forward(run, op); break;
    case MAX_POOL: max_pool_forward(run, op); break;
    case AVERAGE_POOL: average_pool_forward(run, op); break;
    case RELU: relu_forward(run, op); break;
    case ADD: add_forward(run, op); break;
    case COPY: copy_flat(run, values(run->plan, op->in), values(run->plan, op->out), 0, 1); break;
    case BATCH_NORM: batch_norm_forward(run, op); break;
    case GROUP_NORM: group_norm_forward(run, op); break;
    }
}

static void backward(const Run *run, const Operation *op)
{
    if (op->relu || op->kind == RELU) relu_backward(run, op->out);
    switch (op->kind) {
    case CONVOLUTION:
        convolution_to_weights(run, op);
        if (op->bias >= 0) to_bias(run, op);
        if (op->to_input) convolution_to_input(run, op);
        break;
    case LINEAR:
        linear_to_weights(run, op);
        if (op->bias >= 0) to_bias(run, op);
        if (op->to_input) linear_to_input(run, op);
        break;
    case MAX_POOL: if (op->to_input) max_pool_backward(run, op); break;
    case AVERAGE_POOL: if (op->to_input) average_pool_backward(run, op); break;
    case RELU: pass_gradient(run, op->out, op->in, op->to_input); break;
    case ADD:
        pass_gradient(run, op->out, op->in, op->to_input);
        pass_gradient(run, op->out, op->second, op->to_second);
        break;
    case COPY:
        if (op->to_input) copy_flat(run, gradients(run->plan, op->in), gradients(run->plan, op->out), 1, op->to_input);
        break;
    case BATCH_NORM: batch_norm_backward(run, op); break;
    case GROUP_NORM: group_norm_backward(run, op); break;
    }
}

/* The input tensor (number 0) is in place. In training, running statistics in `model` move. */
EXPORT void kernels_forward(const Plan *plan, float *model, int batch, int training)
{
    Run run = run_of(plan, model, 0, batch, training);
    for (int i = 0; i < plan->operation_count; i++) forward(&run, plan->operations + i);
}

/* From the gradient of the outputs to the gradient of all parameters. */
EXPORT void kernels_backward(const Plan *plan, float *model, float *gradient, int batch)
{
    Run run = run_of(plan, model, gradient, batch, 1);
    for (int i = plan->operation_count - 1; i >= 0; i--) backward(&run, plan->operations + i);
}

/* Outputs as (batch, channels), and gradients of outputs added from there. */
EXPORT void kernels_outputs(const Plan *plan, int batch, float *to)
{
    View out = values(plan, plan->output);
    for (int b = 0; b < batch; b++)
        for (int c = 0; c < out.channels; c++)
            *to++ = out.at[b / GROUP * out.group + (long)c * GROUP + b % GROUP];
}
EXPORT void kernels_add_to_outputs(const Plan *plan, int batch, const float *from)
{
    View out = gradients(plan, plan->output);
    for (int b = 0; b < batch; b++)
        for (int c = 0; c < out.channels; c++)
            out.at[b / GROUP * out.group + (long)c * GROUP + b % GROUP] += *from++;
}

/* --- losses --------------------------------------------------------------------------------------------------------------------- */

/* Rows of (batch, width) as lanes. */
ALWAYS_INLINE vec lanes_of(const float *rows, int width, int c, int start, int count, int half)
{
    float lane[GROUP] = {0};
    for (int b = 0; b < count; b++) lane[b] = rows[(long)(start + b) * width + c];
    return v_load(lane + half * LANES);
}

/* mean of weight * cross-entropy(scale * (outputs + frozen), target), and its gradient with respect to the outputs. `frozen` is
 * (batch, channels), `weight` (batch); both may be NULL. Targets were checked by whoever calls. The sum over samples is in double,
 * in their order. */
EXPORT double kernels_cross_entropy(const Plan *plan, int batch, const int64_t *target, const float *frozen, const float *weight,
                                    float scale)
{
    View z_ = values(plan, plan->output), d_ = gradients(plan, plan->output);
    const vec factor = v_all(scale);
    double total = 0;
    for (int start = 0, g = 0; start < batch; start += GROUP, g++) {
        const int count = smaller(GROUP, batch - start);
        float losses[GROUP], chosen[GROUP] = {0};
        for (int half = 0; half < HALVES; half++) {
            float *d = d_.at + g * d_.group + half * LANES;
            const float *z = z_.at + g * z_.group + half * LANES;
            vec largest = v_zero(), sum = v_zero();
            for (int c = 0; c < z_.channels; c++) { /* what goes into the loss is kept where the gradient will be */
                vec x = v_load(z + (long)c * GROUP);
                if (frozen) x = v_add(x, lanes_of(frozen, z_.channels, c, start, count, half));
                x = v_mul(x, factor);
                v_store(d + (long)c * GROUP, x);
                largest = c ? v_select(m_greater(x, largest), x, largest) : x;
            }
            for (int b = half * LANES; b < (half + 1) * LANES && b < count; b++)
                chosen[b] = d[target[start + b] * GROUP + b - half * LANES];
            for (int c = 0; c < z_.channels; c++) {
                vec power = v_exp(v_sub(v_load(d + (long)c * GROUP), largest));
                v_store(d + (long)c * GROUP, power);
                sum = v_add(sum, power);
            }
            v_store(losses + half * LANES, v_sub(v_add(v_log(sum), largest), v_load(chosen + half * LANES)));
            vec share = v_all(scale / (float)batch);
            if (weight) share = v_mul(share, lanes_of(weight, 1, 0, start, count, half));
            share = v_select(m_below(count, half), share, v_zero());
            const vec each = v_div(v_all(1.0f), sum);
            for (int c = 0; c < z_.channels; c++) {
                vec probability = v_mul(v_load(d + (long)c * GROUP), each);
                v_store(d + (long)c * GROUP, v_select(m_below(count, half), v_mul(probability, share), v_zero()));
            }
            float shares[GROUP];
            v_store(shares + half * LANES, share);
            for (int b = half * LANES; b < (half + 1) * LANES && b < count; b++)
                d[target[start + b] * GROUP + b - half * LANES] -= shares[b];
        }
        for (int b = 0; b < count; b++) total += weight ? (double)(losses[b] * weight[start + b]) : (double)losses[b];
    }
    return total / batch;
}

/* The same for the squared error of one output. */
EXPORT double kernels_squared_error(const Plan *plan, int batch, const float *target, const float *frozen, const float *weight,
                                    float scale)
{
    View z_ = values(plan, plan->output), d_ = gradients(plan, plan->output);
    double total = 0;
    for (int start = 0, g = 0; start < batch; start += GROUP, g++) {
        const int count = smaller(GROUP, batch - start);
        const float *z = z_.at + g * z_.group;
        float *d = d_.at + g * d_.group;
        for (int b = 0; b < GROUP; b++) {
            d[b] = 0;
            if (b >= count) continue;
            const float own = frozen ? z[b] + frozen[start + b] : z[b];
            const float away = own * scale - target[start + b], each = weight ? weight[start + b] : 1.0f;
            d[b] = 2.0f * away * each * scale / (float)batch;
            total += (double)(away * away * each);
        }
    }
    return total / batch;
}

/* --- optimizers, as torch has them ---------------------------------------------------------------------------------------------- */

/* n numbers as whole registers, the last of them over a copy. */
#define FOR_ALL(n, i) for (int64_t i = 0; i + LANES <= (n); i += LANES)
#define REST(n) ((n) - (n) % LANES)

/* g += decay w; v = momentum v + (1 - dampening) g, or g where the buffer is new; w -= rate (nesterov ? g + momentum v : v). */
ALWAYS_INLINE void sgd_one(float *w, const float *g, float *v, float rate, float momentum, float dampening, float decay, int nesterov,
                           int fresh)
{
    vec x = v_load(w), slope = v_load(g);
    if (decay != 0) slope = v_fma(v_all(decay), x, slope);
    if (momentum != 0) {
        vec speed = fresh ? slope : v_fma(v_all(momentum), v_load(v), v_mul(v_all(1 - dampening), slope));
        v_store(v, speed);
        slope = nesterov ? v_fma(v_all(momentum), speed, slope) : speed;
    }
    v_store(w, v_fma(v_all(-rate), slope, x));
}

EXPORT void kernels_sgd(int64_t n, float *w, const float *g, float *v, float rate, float momentum, float dampening, float decay,
                        int nesterov, int fresh)
{
    FOR_ALL(n, i) sgd_one(w + i, g + i, v + (momentum != 0 ? i : 0), rate, momentum, dampening, decay, nesterov, fresh);
    float a[LANES] = {0}, b[LANES] = {0}, c[LANES] = {0};
    const int64_t done = REST(n);
    const size_t bytes = sizeof(float) * (size_t)(n - done);
    memcpy(a, w + done, bytes), memcpy(b, g + done, bytes);
    if (momentum != 0) memcpy(c, v + done, bytes);
    sgd_one(a, b, c, rate, momentum, dampening, decay, nesterov, fresh);
    memcpy(w + done, a, bytes);
    if (momentum != 0) memcpy(v + done, c, bytes);
}

/* g += decay w; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g g; w -= step m / (sqrt(v) / correction + epsilon). */
typedef struct {
    float step, new1, beta2, new2, correction, epsilon, decay; /* new: 1 - beta, rounded once */
} Adam;

ALWAYS_INLINE void adam_one(float *w, const float *g, float *m, float *v, const Adam *a)
{
    vec x = v_load(w), slope = v_load(g), mean = v_load(m);
    if (a->decay != 0) slope = v_fma(v_all(a->decay), x, slope);
    mean = v_fma(v_all(a->new1), v_sub(slope, mean), mean);
    vec square = v_fma(v_mul(v_all(a->new2), slope), slope, v_mul(v_all(a->beta2), v_load(v)));
    vec size = v_add(v_div(v_sqrt(square), v_all(a->correction)), v_all(a->epsilon));
    v_store(m, mean), v_store(v, square);
    v_store(w, v_sub(x, v_mul(v_all(a->step), v_div(mean, size))));
}

EXPORT void kernels_adam(int64_t n, float *w, const float *g, float *m, float *v, const Adam *options)
{
    FOR_ALL(n, i) adam_one(w + i, g + i, m + i, v + i, options);
    float a[LANES] = {0}, b[LANES] = {0}, c[LANES] = {0}, d[LANES] = {0};
    const int64_t done = REST(n);
    const size_t bytes = sizeof(float) * (size_t)(n - done);
    memcpy(a, w + done, bytes), memcpy(b, g + done, bytes), memcpy(c, m + done, bytes), memcpy(d, v + done, bytes);
    adam_one(a, b, c, d, options);
    memcpy(w + done, a, bytes), memcpy(m + done, c, bytes), memcpy(v + done, d, bytes);
}
