/* The two inner loops that all the time goes into: a tile of accumulators in registers.
 *
 * `forward_tile` adds up input * weight over taps for O output channels at X pixels (sixteen samples each); it serves
 * convolutions, their gradient with respect to the input, and linear layers. `weight_tile` adds up gradient * input over pixels
 * for O channels and T taps. O, X and T are constants of each instance, so that the accumulators are registers; which instance
 * is taken depends on the shapes and the machine, and the order in which one accumulator sums does not.
 */
#ifndef ARCHIPELAGO_TILES_H
#define ARCHIPELAGO_TILES_H

#include "lanes.h"

#define LARGEST 8
/* Accumulators, the operands of the shorter side, and one of the other. */
#define FITS(a, b) ((a) * (b) + ((a) < (b) ? (a) : (b)) + 1 <= REGISTERS)

typedef struct {
    const float *in; /* at tap (0, 0) of the first pixel */
    long in_x;       /* from a pixel to the next */
    const int32_t *offset; /* of taps inside a row of the kernel: [kx][channel] */
    int first, last; /* those of them that count */
    int rows;        /* of the kernel */
    long in_row, weight_row;
    const float *weight; /* tap t: O floats at weight + t * weight_tap */
    long weight_tap;
    const float *bias; /* O floats, or NULL */
    float *out;
    long out_channel, out_x;
    int add, relu; /* add to what is there; max(0, .) */
} ForwardTile;

ALWAYS_INLINE void forward_tile(const ForwardTile *t, const int O, const int X)
{
    vec sum[LARGEST][LARGEST];
    UNROLL for (int o = 0; o < O; o++) {
        vec start = t->bias ? v_all(t->bias[o]) : v_zero();
        UNROLL for (int x = 0; x < X; x++) sum[o][x] = start;
    }
    const float *in = t->in, *weight = t->weight;
    const long in_x = t->in_x, tap = t->weight_tap;
    for (int row = 0; row < t->rows; row++, in += t->in_row, weight += t->weight_row) {
        const float *w = weight + t->first * tap;
        for (const int32_t *at = t->offset + t->first, *end = t->offset + t->last; at < end; at++, w += tap) {
            const float *p = in + *at;
            if (O < X) {
                vec factor[LARGEST];
                UNROLL for (int o = 0; o < O; o++) factor[o] = v_all(w[o]);
                UNROLL for (int x = 0; x < X; x++) {
                    vec value = v_load(p + x * in_x);
                    UNROLL for (int o = 0; o < O; o++) sum[o][x] = v_fma(factor[o], value, sum[o][x]);
                }
            } else {
                vec value[LARGEST];
                UNROLL for (int x = 0; x < X; x++) value[x] = v_load(p + x * in_x);
                UNROLL for (int o = 0; o < O; o++) {
                    vec factor = v_all(w[o]);
                    UNROLL for (int x = 0; x < X; x++) sum[o][x] = v_fma(factor, value[x], sum[o][x]);
                }
            }
        }
    }
    UNROLL for (int o = 0; o < O; o++) {
        UNROLL for (int x = 0; x < X; x++) {
            float *out = t->out + o * t->out_channel + x * t->out_x;
            vec value = t->add ? v_add(v_load(out), sum[o][x]) : sum[o][x];
            v_store(out, t->relu ? v_relu(value) : value);
        }
    }
}

typedef struct {
    const float *gradient; /* of the output, first pixel of the first channel */
    long gradient_channel, gradient_row;
    const float *in;
    const int32_t *offset; /* of T taps */
    long in_x, in_row;     /* of the input, from an output pixel to the next */
    int rows, width;       /* output pixels */
    float *sum;            /* sixteen lanes of each weight: sum + o * sum_channel + t * GROUP; read and written */
    long sum_channel;
} WeightTile;

ALWAYS_INLINE void weight_tile(const WeightTile *t, const int O, const int T)
{
    vec sum[LARGEST][LARGEST];
    const float *tap[LARGEST];
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int k = 0; k < T; k++) sum[o][k] = v_load(t->sum + o * t->sum_channel + k * GROUP);
    UNROLL for (int k = 0; k < T; k++) tap[k] = t->in + t->offset[k];
    const long in_x = t->in_x, channel = t->gradient_channel;
    for (int y = 0; y < t->rows; y++) {
        const float *d = t->gradient + y * t->gradient_row;
        long at = y * t->in_row;
        for (int x = 0; x < t->width; x++, d += GROUP, at += in_x) {
            if (O < T) {
                vec slope[LARGEST];
                UNROLL for (int o = 0; o < O; o++) slope[o] = v_load(d + o * channel);
                UNROLL for (int k = 0; k < T; k++) {
                    vec value = v_load(tap[k] + at);
                    UNROLL for (int o = 0; o < O; o++) sum[o][k] = v_fma(slope[o], value, sum[o][k]);
                }
            } else {
                vec value[LARGEST];
                UNROLL for (int k = 0; k < T; k++) value[k] = v_load(tap[k] + at);
                UNROLL for (int o = 0; o < O; o++) {
                    vec slope = v_load(d + o * channel);
                    UNROLL for (int k = 0; k < T; k++) sum[o][k] = v_fma(slope, value[k], sum[o][k]);
                }
            }
        }
    }
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int k = 0; k < T; k++) v_store(t->sum + o * t->sum_channel + k * GROUP, sum[o][k]);
}

/* All instances that fit into the registers. */
#define INSTANCE(a, b) \
    static void forward_##a##_##b(const ForwardTile *t) { if (FITS(a, b)) forward_tile(t, a, b); } \
    static void weight_##a##_##b(const WeightTile *t) { if (FITS(a, b)) weight_tile(t, a, b); }
#define INSTANCES(a) \
    INSTANCE(a, 1) INSTANCE(a, 2) INSTANCE(a, 3) INSTANCE(a, 4) INSTANCE(a, 5) INSTANCE(a, 6) INSTANCE(a, 7) INSTANCE(a, 8)
INSTANCES(1) INSTANCES(2) INSTANCES(3) INSTANCES(4) INSTANCES(5) INSTANCES(6) INSTANCES(7) INSTANCES(8)
#define NAMES(kind, a) \
    {0, kind##_##a##_1, kind##_##a##_2, kind##_##a##_3, kind##_##a##_4, kind##_##a##_5, kind##_##a##_6, kind##_##a##_7, \
     kind##_##a##_8}
#define TABLE(kind) \
    {{0}, NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3), NAMES(kind, 4), NAMES(kind, 5), NAMES(kind, 6), NAMES(kind, 7), \
     NAMES(kind, 8)}
static void (*const FORWARD[LARGEST + 1][LARGEST + 1])(const ForwardTile *) = TABLE(forward);
static void (*const WEIGHT[LARGEST + 1][LARGEST + 1])(const WeightTile *) = TABLE(weight);

/* The tile that covers an m x n rectangle in the least time, by what a core does in a cycle: two multiplications and two
 * loads, with eight of the former on their way. What is left over at the edges is done by smaller tiles. */
typedef struct {
    int a, b;
} TileShape;

static long tile_cost(int a, int b)
{
    long multiplications = a * b, loads = a + b;
    long cost = multiplications > loads ? multiplications : loads;
    return (cost > 8 ? cost : 8) + 1;
}

static TileShape best_tile(int m, int n)
{
    TileShape best = {1, 1};
    long least = -1;
    for (int a = 1; a <= LARGEST && a <= m; a++) {
        for (int b = 1; b <= LARGEST && b <= n; b++) {
            if (!FITS(a, b)) continue;
            int over_a = m % a, over_b = n % b;
            long cost = (long)(m / a) * (n / b) * tile_cost(a, b);
            if (over_a) cost += (n / b) * tile_cost(over_a, b);
            if (over_b) cost += (m / a) * tile_cost(a, over_b);
            if (over_a && over_b) cost += tile_cost(over_a, over_b);
            if (least < 0 || cost < least) {
                least = cost;
                best.a = a, best.b = b;
            }
        }
    }
    return best;
}

#endif
