/* Lanes: sixteen samples side by side.
 *
 * Every activation is stored as sixteen consecutive floats, one for each sample of a group. The memory layout does not
 * depend on the machine; only the number of lanes that one register holds does (LANES: 16 with AVX-512, 8 with AVX2, where
 * kernels go over the two halves of a group one after the other).
 *
 * Equal bits on both: a lane is computed by the same IEEE operations in the same order whichever register it sits in, and
 * products are added by explicit fused operations only (the file is compiled with -ffp-contract=off). Where lanes meet,
 * they meet in `lane_sum`, a fixed tree.
 */
#ifndef ARCHIPELAGO_LANES_H
#define ARCHIPELAGO_LANES_H

#include <immintrin.h>
#include <stdint.h>

#define GROUP 16 /* samples of a group */
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

#if defined(__AVX512F__)

#define LANES 16
#define REGISTERS 32
typedef __m512 vec;
typedef __mmask16 mask;
ALWAYS_INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS_INLINE void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
ALWAYS_INLINE vec v_all(float a) { return _mm512_set1_ps(a); }
ALWAYS_INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
ALWAYS_INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
ALWAYS_INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
ALWAYS_INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
ALWAYS_INLINE vec v_sqrt(vec a) { return _mm512_sqrt_ps(a); }
ALWAYS_INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); } /* a b + c */
ALWAYS_INLINE mask m_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
ALWAYS_INLINE mask m_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE mask m_nan(vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
ALWAYS_INLINE mask m_or(mask a, mask b) { return (mask)(a | b); }
ALWAYS_INLINE vec v_select(mask m, vec yes, vec no) { return _mm512_mask_blend_ps(m, no, yes); }
ALWAYS_INLINE vec v_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS_INLINE vec v_power_of_two(vec n) /* 2^n for whole n in [-126, 127] */
{
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
ALWAYS_INLINE void v_split(vec a, vec *m, vec *e) /* a = m 2^e, m in [1, 2), for normal a > 0 */
{
    __m512i bits = _mm512_castps_si512(a);
    *e = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127)));
    bits = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x007fffff)), _mm512_set1_epi32(0x3f800000));
    *m = _mm512_castsi512_ps(bits);
}
ALWAYS_INLINE vec v_from_bytes(__m128i a, int half) /* the bytes of lanes `half`*LANES onwards, as floats */
{
    (void)half;
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a));
}
ALWAYS_INLINE mask m_below(int count, int half) /* lanes whose number in the group is below `count` */
{
    (void)half;
    return (mask)(count >= 16 ? 0xffff : (1u << count) - 1u);
}

#elif defined(__AVX2__) && defined(__FMA__)

#define LANES 8
#define REGISTERS 16
typedef __m256 vec;
typedef __m256 mask;
ALWAYS_INLINE vec v_load(const float *p) { return _mm256_loadu_ps(p); }
ALWAYS_INLINE void v_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
ALWAYS_INLINE vec v_all(float a) { return _mm256_set1_ps(a); }
ALWAYS_INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
ALWAYS_INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
ALWAYS_INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
ALWAYS_INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
ALWAYS_INLINE vec v_sqrt(vec a) { return _mm256_sqrt_ps(a); }
ALWAYS_INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE mask m_greater(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
ALWAYS_INLINE mask m_equal(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE mask m_nan(vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
ALWAYS_INLINE mask m_or(mask a, mask b) { return _mm256_or_ps(a, b); }
ALWAYS_INLINE vec v_select(mask m, vec yes, vec no) { return _mm256_blendv_ps(no, yes, m); }
ALWAYS_INLINE vec v_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS_INLINE vec v_power_of_two(vec n)
{
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
ALWAYS_INLINE void v_split(vec a, vec *m, vec *e)
{
    __m256i bits = _mm256_castps_si256(a);
    *e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
    bits = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f800000));
    *m = _mm256_castsi256_ps(bits);
}
ALWAYS_INLINE vec v_from_bytes(__m128i a, int half)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(half ? _mm_srli_si128(a, 8) : a));
}
ALWAYS_INLINE mask m_below(int count, int half)
{
    const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - half * 8), number));
}

#else
#error "these kernels need AVX2 with FMA, or AVX-512"
#endif

#define HALVES (GROUP / LANES)

ALWAYS_INLINE vec v_zero(void) { return v_all(0.0f); }

/* max(a, 0) that keeps NaN: a client whose training blew up must be seen to. */
ALWAYS_INLINE vec v_relu(vec a) { return v_select(m_greater(v_zero(), a), v_zero(), a); }

/* The sum of the sixteen lanes at p: i with i + 8, then i + 4, i + 2, i + 1. */
ALWAYS_INLINE float lane_sum(const float *p)
{
    __m256 eight = _mm256_add_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* An 8x8 block of floats transposed: rows `from` apart become columns, rows of the result are `to` apart. */
ALWAYS_INLINE void transpose_8x8(const float *const in[8], float *out, long to)
{
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(in[i]);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * to, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * to, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

/* e^a for a <= 0: range reduction by ln 2 in two parts, Taylor polynomial of degree 7 on [-ln2/2, ln2/2] (error below one unit
 * in the last place). What underflows becomes 0; NaN stays. */
ALWAYS_INLINE vec v_exp(vec a)
{
    vec low = v_all(-87.0f);
    mask tiny = m_greater(low, a);
    vec x = v_select(tiny, low, a);
    vec n = v_round(v_mul(x, v_all(1.44269504088896341f)));
    vec r = v_fma(n, v_all(-0.693145751953125f), x);
    r = v_fma(n, v_all(-1.42860682030941723e-6f), r);
    vec p = v_all(1.0f / 5040);
    p = v_fma(p, r, v_all(1.0f / 720));
    p = v_fma(p, r, v_all(1.0f / 120));
    p = v_fma(p, r, v_all(1.0f / 24));
    p = v_fma(p, r, v_all(1.0f / 6));
    p = v_fma(p, r, v_all(0.5f));
    p = v_fma(v_mul(p, r), r, r);
    p = v_add(p, v_all(1.0f));
    vec y = v_mul(p, v_power_of_two(n));
    y = v_select(tiny, v_zero(), y);
    return v_select(m_nan(a), a, y);
}

/* log a for normal a >= 1: a = m 2^e with m in [sqrt(1/2), sqrt 2), log m = 2 artanh((m - 1) / (m + 1)) by its series to the
 * eleventh power (error below two units in the last place). NaN stays. */
ALWAYS_INLINE vec v_log(vec a)
{
    vec m, e;
    v_split(a, &m, &e);
    mask big = m_greater(m, v_all(1.41421356f));
    m = v_select(big, v_mul(m, v_all(0.5f)), m);
    e = v_select(big, v_add(e, v_all(1.0f)), e);
    vec s = v_div(v_sub(m, v_all(1.0f)), v_add(m, v_all(1.0f)));
    vec z = v_mul(s, s);
    vec p = v_all(2.0f / 11);
    p = v_fma(p, z, v_all(2.0f / 9));
    p = v_fma(p, z, v_all(2.0f / 7));
    p = v_fma(p, z, v_all(2.0f / 5));
    p = v_fma(p, z, v_all(2.0f / 3));
    vec y = v_fma(v_mul(p, z), s, v_mul(v_all(2.0f), s));
    y = v_fma(e, v_all(1.42860682030941723e-6f), y);
    y = v_fma(e, v_all(0.693145751953125f), y);
    return v_select(m_nan(a), a, y);
}

#endif
