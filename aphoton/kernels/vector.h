/* Vectors of floats as wide as the machine's registers, through the compiler's own vector types.
 *
 * No intrinsics: GCC and Clang turn the same source into AVX2, AVX-512 or NEON. A fused multiply-add is written
 * `sum += a * b` and contracted by the compiler (-ffp-contract=fast); nothing else is reordered, so what an
 * expression gives does not depend on where it was inlined. */

#ifndef APH_VECTOR_H
#define APH_VECTOR_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define CHUNK (2 * LANES) /* floats that `load_pair` gives */
#define LOG2E 1.44269504088896340736f

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec_unaligned __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

typedef enum { F32 = 0, BF16 = 1 } dtype;

ALWAYS size_t dtype_size(int type) { return type == BF16 ? 2 : 4; }

ALWAYS vec load(const float *p) { return *(const vec_unaligned *)p; }
ALWAYS void store(float *p, vec v) { *(vec_unaligned *)p = v; }
ALWAYS vec splat(float x) { return x - (vec){0}; }

ALWAYS vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* NaN in `a` stays. */
ALWAYS vec at_least(vec a, vec low) { return choose(a < low, low, a); }
ALWAYS vec at_most(vec a, vec high) { return choose(a > high, high, a); }

ALWAYS float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest, ties to even. */
ALWAYS uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) /* NaN: rounding could carry it to infinity */
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* CHUNK values from memory as two vectors. Of bf16, `lo` gets the values at even places and `hi` those at odd ones:
 * that costs two instructions, where keeping the order would cost shuffles. Whoever needs the order stores the values
 * accordingly (packed matrices) or undoes it at the end (attention). */
ALWAYS void load_pair(int type, const void *p, vec *lo, vec *hi)
{
    if (type == BF16) {
        uvec both = *(const uvec_unaligned *)p;
        *lo = (vec)(both << 16);
        *hi = (vec)(both & 0xffff0000u);
    } else {
        *lo = load(p);
        *hi = load((const float *)p + LANES);
    }
}

/* Place in a pair of vectors, as `load_pair` gives them, of value i of a chunk. */
ALWAYS int place(int type, int i) { return type == BF16 ? (i & 1) * LANES + (i >> 1) : i; }

/* 2^x, to 1 ulp or so. 2^0 is exactly 1 and 2^-inf exactly 0: the attention's neutral steps depend on both. Below
 * -126 it gives 0, above 127 2^127; NaN stays. */
ALWAYS vec exp2_vec(vec x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vec bounded = at_most(at_least(x, splat(-126.0f)), splat(127.0f));
    vec shifted = bounded + magic;
    vec r = bounded - (shifted - magic);
    /* Least-squares fit with Remez-like weights on [-0.5, 0.5]; relative error 2e-9. */
    vec p = splat(0.00015353360638442268f);
    p = p * r + 0.0013398874867351467f;
    p = p * r + 0.009618437366406125f;
    p = p * r + 0.055503324696918474f;
    p = p * r + 0.24022647913498896f;
    p = p * r + 0.6931472028559714f;
    p = p * r + 1.0f;
    vec power = (vec)(((uvec)shifted << 23) + 0x3f800000u);
    return choose(x < -126.0f, splat(0.0f), p * power);
}

/* Adds up the lanes, in one fixed order. */
ALWAYS float sum_lanes(vec v)
{
    float lane[LANES];
    store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* One step of a transposing sum: lanes of `a` and `b` are added in twos, a's going to some lanes, b's to others. */
#if LANES == 4
#define FOLD1(a, b) (SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7))
#define FOLD2(a, b) (SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7))
#elif LANES == 8
#define FOLD1(a, b) (SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15))
#define FOLD2(a, b) (SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define FOLD3(a, b) (SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#define FOLD1(a, b)                                                                                                    \
    (SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +                                         \
     SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31))
#define FOLD2(a, b)                                                                                                    \
    (SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +                                         \
     SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD3(a, b)                                                                                                    \
    (SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                                           \
     SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b)                                                                                                    \
    (SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +                                         \
     SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#endif

/* Lane i of the result is the sum of v[i]'s lanes, in the same order for each i. */
ALWAYS vec sum_each(const vec v[LANES])
{
    vec four[LANES / 4];
    for (int i = 0; i < LANES / 4; i++)
        four[i] = FOLD2(FOLD1(v[4 * i], v[4 * i + 1]), FOLD1(v[4 * i + 2], v[4 * i + 3]));
#if LANES == 4
    return four[0];
#elif LANES == 8
    return FOLD3(four[0], four[1]);
#else
    return FOLD4(FOLD3(four[0], four[1]), FOLD3(four[2], four[3]));
#endif
}

#endif
