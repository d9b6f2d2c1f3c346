// Activation functions with their first two derivatives, in operations that compilers do in vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

enum Shape : std::int64_t { RELU, LEAKY, TANH, GELU, GELU_TANH, SILU }; // as in activations.py

struct Activation {
    std::int64_t shape;
    double low; // the slope of LEAKY below zero
};

struct Curve {
    float value, slope, bend; // f, f', f''
};

// e^x, to within two units in the last place: 2^n by its bits times a series for the rest.
inline float exponential(float x) {
    const float shift = 12582912.f; // added to a number, it leaves a whole one in the last bits
    const float bounded = std::min(std::max(x, -87.f), 88.f), shifted = bounded * 1.44269504f + shift, n = shifted - shift;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1 / 5040.f;
    sum = sum * r + 1 / 720.f, sum = sum * r + 1 / 120.f, sum = sum * r + 1 / 24.f, sum = sum * r + 1 / 6.f;
    sum = sum * r + 0.5f, sum = sum * r + 1, sum = sum * r + 1;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return sum * power;
}

// Near zero by a polynomial in x^2 (a Chebyshev fit), because 1 - e^-2x would have lost its digits.
inline float hyperbolic_tangent(float x) {
    const float square = x * x, e = exponential(-2 * std::abs(x)), far = (1 - e) / (1 + e);
    float near = -0.005856428f;
    near = near * square + 0.020757476f, near = near * square - 0.05376992f, near = near * square + 0.13331705f;
    near = near * square - 0.33333284f, near = near * square + 1;
    return square < 0.36f ? x * near : x < 0 ? -far : far;
}

inline Curve curve_tanh(float x) {
    const float t = hyperbolic_tangent(x), slope = 1 - t * t;
    return {t, slope, -2 * t * slope};
}

inline Curve curve_silu(float x) {
    const float s = 1 / (1 + exponential(-x)), rest = 1 - s;
    return {x * s, s * (1 + x * rest), s * rest * (2 + x * (1 - 2 * s))};
}

// x times the normal distribution function, of which the tail is e^(-x^2/2) t P(t) with t = 1 / (1 + |x| / sqrt(8)) and
// P a Chebyshev fit.
inline Curve curve_gelu(float x) {
    const float e = exponential(-0.5f * x * x), t = 1 / (1 + std::abs(x) * 0.35355339f), density = e * 0.39894228f;
    float sum = -0.05801452f;
    sum = sum * t + 0.27970701f, sum = sum * t - 0.47772372f, sum = sum * t + 0.26794654f, sum = sum * t - 0.020165045f;
    sum = sum * t + 0.20017207f, sum = sum * t + 0.24368484f, sum = sum * t + 0.28230259f, sum = sum * t + 0.28209019f;
    const float tail = 0.5f * e * t * sum, below = x > 0 ? 1 - tail : tail;
    return {x * below, below + x * density, density * (2 - x * x)};
}

inline Curve curve_gelu_tanh(float x) {
    const float k = 0.79788456f, c = 0.044715f, t = hyperbolic_tangent(k * (x + c * x * x * x)), rest = 1 - t * t;
    const float du = k * (1 + 3 * c * x * x), slope = 0.5f * x * rest;
    return {0.5f * x * (1 + t), 0.5f * (1 + t) + slope * du, rest * du + slope * (6 * k * c * x - 2 * t * du * du)};
}

// The values become f of them; the slopes are f', and the bends, if they are wanted, f''.
template <bool bent, class F>
void apply_curve(const F &f, float *__restrict values, float *__restrict slopes, float *__restrict bends,
                 std::int64_t count) {
    for (std::int64_t i = 0; i < count; i++) {
        const Curve found = f(values[i]);
        values[i] = found.value, slopes[i] = found.slope;
        if (bent) bends[i] = found.bend;
    }
}

template <class F> void apply_curve(const F &f, float *values, float *slopes, float *bends, std::int64_t count) {
    bends ? apply_curve<true>(f, values, slopes, bends, count) : apply_curve<false>(f, values, slopes, bends, count);
}

inline void activate(const Activation &how, float *values, float *slopes, float *bends, std::int64_t count) {
    const float low = how.low;
    switch (how.shape) {
    case TANH: return apply_curve([](float x) { return curve_tanh(x); }, values, slopes, bends, count);
    case GELU: return apply_curve([](float x) { return curve_gelu(x); }, values, slopes, bends, count);
    case GELU_TANH: return apply_curve([](float x) { return curve_gelu_tanh(x); }, values, slopes, bends, count);
    case SILU: return apply_curve([](float x) { return curve_silu(x); }, values, slopes, bends, count);
    default:
        return apply_curve([=](float x) { return x > 0 ? Curve{x, 1, 0} : Curve{low * x, low, 0}; }, values, slopes,
                           bends, count);
    }
}
