// The ConvNet's blocks, without the many trips through memory of one operation after another. Images lie channels last
// (height, width, channel); a block's channels are a multiple of a vector's lanes, and are done so many at a time.
//
// Instance norm, ReLU and 2x2 average pooling in one: forward, backward, and the backward of the backward. Per image and
// channel, with n positions, mean m, r = 1 / sqrt(var + eps):
//     h = (z - m) r      a = gamma h + beta      p = pool(max(a, 0))
// Backward, with q = [a > 0] unpool(dp) and P(v) = v - mean(v) - h mean(v h):
//     dz = gamma r P(q)      dgamma = sum q h      dbeta = sum q
// Backward of that, for S = <v, dz> + <u, dgamma> + <s, dbeta>, with T = <v, P(q)>:
//     dS/dq = gamma r P(v) + u h + s      dS/dgamma = r T      dS/dz = r P(g) - gamma r^2 T h / n
//     where g = u q - gamma r (mean(q h) v + mean(v h) q)
//
// The first block takes images of few channels, so its convolution, too, is done here, as often as z = conv(x, w) + b is
// wanted: that costs less than to keep it. Backward, with the adjoints of conv by its image and by its weights:
//     dx = conv_x'(dz, w)      dw = conv_w'(dz, x)      db = sum dz
// Backward of that, for S = <vx, dx> + <vw, dw> + <vb, db> + ..., is the above with v = conv(vx, w) + conv(x, vw) + vb and
//     dS/dx = conv_x'(dS/dz, w) + conv_x'(dz, vw)      dS/dw = conv_w'(dS/dz, x) + conv_w'(dz, vx)      dS/db = sum dS/dz

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

typedef std::int64_t Int;

template <class R> struct Lanes {
    static constexpr Int count = 64 / sizeof(R);
    typedef Vector<R, count> type;
};

template <class R> using V = typename Lanes<R>::type::type;

template <class R> static inline V<R> load(const R *at) { return Lanes<R>::type::load(at); }
template <class R> static inline void store(R *at, const V<R> &value) { Lanes<R>::type::store(at, value); }

// How far it is to the next row and to the next position.
struct Strides {
    Int row, step;
};

// Norm, ReLU and pooling of as many channels of one image as a vector has lanes. Sums over positions are made row by row,
// so that rounding stays small.

template <class R>
static void norm_forward(const R *z, Strides zs, R *p, Strides ps, const R *gamma, const R *beta, R *mean, R *rstd,
                         Int height, Int width, double eps) {
    const R n = height * width;
    V<R> sum = {}, squares = {};
    for (Int i = 0; i < height; i++) {
        V<R> part = {};
        for (Int j = 0; j < width; j++) part += load(z + i * zs.row + j * zs.step);
        sum += part;
    }
    const V<R> m = sum / n;
    for (Int i = 0; i < height; i++) {
        V<R> part = {};
        for (Int j = 0; j < width; j++) {
            const V<R> d = load(z + i * zs.row + j * zs.step) - m;
            part += d * d;
        }
        squares += part;
    }
    for (Int l = 0; l < Lanes<R>::count; l++) rstd[l] = 1 / std::sqrt(squares[l] / n + (R)eps);
    store(mean, m);
    const V<R> r = load(rstd);
    const V<R> slope = load(gamma) * r, offset = load(beta) - slope * m, zero = {};
    for (Int i = 0; i < height; i += 2)
        for (Int j = 0; j < width; j += 2) {
            V<R> total = {};
            for (Int k = 0; k < 4; k++) {
                const V<R> a = load(z + (i + k / 2) * zs.row + (j + k % 2) * zs.step) * slope + offset;
                total += pick(a > zero, a, zero);
            }
            store(p + i / 2 * ps.row + j / 2 * ps.step, total * (R)0.25);
        }
}

// With `add`, dz is added to what is there.
template <bool add = false, class R>
static void norm_backward(const R *dp, Strides ps, const R *z, R *dz, Strides zs, const R *mean, const R *rstd,
                          const R *gamma, const R *beta, R *dgamma, R *dbeta, Int height, Int width) {
    const R n = height * width;
    const V<R> m = load(mean), r = load(rstd), zero = {};
    const V<R> slope = load(gamma) * r, offset = load(beta) - slope * m;
    V<R> q1 = {}, qz = {};
    for (Int i = 0; i < height; i += 2) {
        V<R> part1 = {}, partz = {};
        for (Int j = 0; j < width; j += 2) {
            const V<R> d = load(dp + i / 2 * ps.row + j / 2 * ps.step) * (R)0.25;
            for (Int k = 0; k < 4; k++) {
                const V<R> here = load(z + (i + k / 2) * zs.row + (j + k % 2) * zs.step);
                const V<R> q = pick(here * slope + offset > zero, d, zero);
                part1 += q;
                partz += q * (here - m);
            }
        }
        q1 += part1;
        qz += partz;
    }
    const V<R> qh = qz * r;
    store(dgamma, load(dgamma) + qh);
    store(dbeta, load(dbeta) + q1);
    const V<R> level = q1 / n, tilt = qh * r / n;
    for (Int i = 0; i < height; i += 2)
        for (Int j = 0; j < width; j += 2) {
            const V<R> d = load(dp + i / 2 * ps.row + j / 2 * ps.step) * (R)0.25;
            for (Int k = 0; k < 4; k++) {
                const Int at = (i + k / 2) * zs.row + (j + k % 2) * zs.step;
                const V<R> here = load(z + at);
                const V<R> q = pick(here * slope + offset > zero, d, zero);
                const V<R> found = slope * (q - level - (here - m) * tilt);
                store(dz + at, add ? load(dz + at) + found : found);
            }
        }
}

// If dz is wanted, too, that is the same as in norm_backward.
template <class R>
static void norm_twice(const R *v, const R *u, const R *s, const R *dp, R *gdp, Strides ps, const R *z, R *gz, R *dz,
                       Strides zs, const R *mean, const R *rstd, const R *gamma, const R *beta, R *ggamma, Int height,
                       Int width) {
    const R n = height * width;
    const V<R> m = load(mean), r = load(rstd), g = load(gamma), zero = {};
    const V<R> slope = g * r, offset = load(beta) - slope * m, us = load(u), ss = load(s);
    V<R> q1 = {}, v1 = {}, qz = {}, vz = {}, qv = {};
    for (Int i = 0; i < height; i += 2) {
        V<R> pq1 = {}, pv1 = {}, pqz = {}, pvz = {}, pqv = {};
        for (Int j = 0; j < width; j += 2) {
            const V<R> d = load(dp + i / 2 * ps.row + j / 2 * ps.step) * (R)0.25;
            for (Int k = 0; k < 4; k++) {
                const Int at = (i + k / 2) * zs.row + (j + k % 2) * zs.step;
                const V<R> here = load(z + at), there = load(v + at), away = here - m;
                const V<R> q = pick(here * slope + offset > zero, d, zero);
                pq1 += q;
                pv1 += there;
                pqz += q * away;
                pvz += there * away;
                pqv += q * there;
            }
        }
        q1 += pq1;
        v1 += pv1;
        qz += pqz;
        vz += pvz;
        qv += pqv;
    }
    const V<R> mq = q1 / n, mv = v1 / n, qh = qz * r / n, vh = vz * r / n;
    const V<R> t = qv - n * mq * mv - n * qh * vh;
    store(ggamma, load(ggamma) + r * t);
    // dS/dz = r (by_q q + by_v v - level - h tilt)
    const V<R> by_q = us - slope * vh, by_v = -slope * qh;
    const V<R> level = by_q * mq + by_v * mv;
    const V<R> tilt = by_q * qh + by_v * vh + slope * t / n;
    for (Int i = 0; i < height; i += 2)
        for (Int j = 0; j < width; j += 2) {
            const Int pooled = i / 2 * ps.row + j / 2 * ps.step;
            const V<R> d = load(dp + pooled) * (R)0.25;
            V<R> total = {};
            for (Int k = 0; k < 4; k++) {
                const Int at = (i + k / 2) * zs.row + (j + k % 2) * zs.step;
                const V<R> here = load(z + at), there = load(v + at), h = (here - m) * r;
                const auto open = here * slope + offset > zero;
                const V<R> q = pick(open, d, zero);
                total += pick(open, slope * (there - mv - h * vh) + us * h + ss, zero);
                store(gz + at, r * (by_q * q + by_v * there - level - h * tilt));
                if (dz) store(dz + at, slope * (q - mq - h * qh));
            }
            store(gdp + pooled, total * (R)0.25);
        }
}

// The 3x3 convolution of one image of few channels. The image has a border of zeros; of the output, as many channels as a
// vector has lanes are done at a time. Weights lie (row, column, channel, output).
template <class R, int channels> struct Few {
    static constexpr Int lanes = Lanes<R>::count, span = 3 * channels, taps = 3 * span;
    static constexpr Int padded = (taps + lanes - 1) / lanes * lanes;
    const Int height, width, outputs, padding;
    const Int tall = height + 2 * padding - 2, wide = width + 2 * padding - 2, positions = tall * wide;
    const Int margin = 2, all_shares = (tall + 2 * margin) * (wide + 2 * margin) * padded;
    const Int edge = (width + 2 * padding) * channels, bordered = (height + 2 * padding) * edge;

    void border(const R *x, R *to) const {
        for (Int i = 0; i < height; i++)
            std::copy_n(x + i * width * channels, width * channels, to + (i + padding) * edge + padding * channels);
    }

    template <int block> void tile(const R *x, const R *weights, R *z) const {
        V<R> total[block];
        for (int k = 0; k < block; k++) total[k] = load(z + k * lanes);
        for (Int row = 0; row < 3; row++)
#pragma GCC unroll 9
            for (Int t = 0; t < span; t++) {
                const V<R> by = load(weights + (row * span + t) * outputs);
                for (int k = 0; k < block; k++) total[k] += x[row * edge + k * channels + t] * by;
            }
        for (int k = 0; k < block; k++) store(z + k * lanes, total[k]);
    }

    // Adds to z.
    void convolve(const R *x, const R *weights, R *z) const {
        for (Int i = 0; i < tall; i++, x += edge, z += wide * lanes) {
            Int j = 0;
            for (; j + 8 <= wide; j += 8) tile<8>(x + j * channels, weights, z + j * lanes);
            for (; j < wide; j += 2) tile<2>(x + j * channels, weights, z + j * lanes);
        }
    }

    void convolve(const R *x, const R *weights, const R *bias, R *z) const {
        const V<R> first = load(bias);
        for (Int at = 0; at < positions; at++) store(z + at * lanes, first);
        convolve(x, weights, z);
    }

    // Adds to the gradients by weights and bias.
    void by_weights(const R *dz, const R *x, R *dw, R *db) const {
        for (Int i = 0; i < tall; i++) {
            V<R> sum = {};
            for (Int j = 0; j < wide; j++) sum += load(dz + (i * wide + j) * lanes);
            if (db) store(db, load(db) + sum);
            for (Int row = 0; row < 3; row++) {
                V<R> part[span] = {};
                for (Int j = 0; j < wide; j++) {
                    const V<R> d = load(dz + (i * wide + j) * lanes);
                    const R *at = x + (i + row) * edge + j * channels;
#pragma GCC unroll 9
                    for (Int t = 0; t < span; t++) part[t] += at[t] * d;
                }
                R *to = dw + row * span * outputs;
                for (Int t = 0; t < span; t++) store(to + t * outputs, load(to + t * outputs) + part[t]);
            }
        }
    }

    // Each output's weights in a row, with zeros behind them.
    std::vector<R> rows(const R *weights) const {
        std::vector<R> transposed(outputs * padded);
        for (Int t = 0; t < taps; t++)
            for (Int o = 0; o < outputs; o++) transposed[o * padded + t] = weights[t * outputs + o];
        return transposed;
    }

    template <int block> void spread_tile(const R *dz, const R *rows, R *shares, bool add) const {
        constexpr Int vectors = padded / lanes;
        V<R> total[block][vectors] = {};
        if (add)
            for (Int k = 0; k < block; k++)
                for (Int v = 0; v < vectors; v++) total[k][v] = load(shares + k * padded + v * lanes);
        for (Int o = 0; o < lanes; o++)
            for (Int v = 0; v < vectors; v++) {
                const V<R> by = load(rows + o * padded + v * lanes);
                for (Int k = 0; k < block; k++) total[k][v] += dz[k * lanes + o] * by;
            }
        for (Int k = 0; k < block; k++)
            for (Int v = 0; v < vectors; v++) store(shares + k * padded + v * lanes, total[k][v]);
    }

    // What each position gives to each of the pixels under its window; around the positions is a margin of zeros.
    void spread(const R *dz, const R *rows, R *shares, bool add) const {
        shares += (margin * (wide + 2 * margin) + margin) * padded;
        for (Int i = 0; i < tall; i++, dz += wide * lanes, shares += (wide + 2 * margin) * padded) {
            Int j = 0;
            for (; j + 8 <= wide; j += 8) spread_tile<8>(dz + j * lanes, rows, shares + j * padded, add);
            for (; j < wide; j += 2) spread_tile<2>(dz + j * lanes, rows, shares + j * padded, add);
        }
    }

    // The same of two at once, and of all outputs, which lie one vector after the other.
    template <int block>
    void spread_both_tile(const R *one, const R *one_rows, const R *two, const R *two_rows, R *shares) const {
        constexpr Int vectors = padded / lanes;
        V<R> total[block][vectors] = {};
        for (Int o = 0; o < outputs; o++, one_rows += padded, two_rows += padded) {
            const Int at = o / lanes * positions * lanes + o % lanes;
            for (Int v = 0; v < vectors; v++) {
                const V<R> by = load(one_rows + v * lanes), other = load(two_rows + v * lanes);
                for (Int k = 0; k < block; k++) total[k][v] += one[at + k * lanes] * by + two[at + k * lanes] * other;
            }
        }
        for (Int k = 0; k < block; k++)
            for (Int v = 0; v < vectors; v++) store(shares + k * padded + v * lanes, total[k][v]);
    }

    void spread(const R *one, const R *one_rows, const R *two, const R *two_rows, R *shares) const {
        shares += (margin * (wide + 2 * margin) + margin) * padded;
        for (Int i = 0; i < tall; i++, one += wide * lanes, two += wide * lanes, shares += (wide + 2 * margin) * padded) {
            Int j = 0;
            for (; j + 8 <= wide; j += 8)
                spread_both_tile<8>(one + j * lanes, one_rows, two + j * lanes, two_rows, shares + j * padded);
            for (; j < wide; j += 2)
                spread_both_tile<2>(one + j * lanes, one_rows, two + j * lanes, two_rows, shares + j * padded);
        }
    }

    // What each pixel gets of that.
    void gather(const R *shares, R *dx) const {
        typedef R Four __attribute__((vector_size(4 * sizeof(R)), aligned(sizeof(R)), may_alias));
        for (Int i = 0; i < height; i++)
            for (Int j = 0; j < width; j++, dx += channels) {
                Four total = {};
                for (Int tap = 0; tap < 9; tap++) {
                    const Int y = i + padding + margin - tap / 3, x = j + padding + margin - tap % 3;
                    total += *(const Four *)(shares + (y * (wide + 2 * margin) + x) * padded + tap * channels);
                }
                for (int c = 0; c < channels; c++) dx[c] = total[c];
            }
    }
};
