// What stands between the convolutions of the ConvNet, without the many trips through memory of one operation after
// another. Images lie channels last (height, width, channel); the channels are a multiple of a vector's lanes.
//
// Instance norm, ReLU and 2x2 average pooling in one: forward, backward, and the backward of the backward. Per image and
// channel, with n positions, mean m, r = 1 / sqrt(var + eps):
//     h = (z - m) r      a = gamma h + beta      p = pool(max(a, 0))
// Backward, with q = [a > 0] unpool(dp) and P(v) = v - mean(v) - h mean(v h):
//     dz = gamma r P(q)      dgamma = sum q h      dbeta = sum q
// Backward of that, for S = <v, dz> + <u, dgamma> + <s, dbeta>, with T = <v, P(q)>:
//     dS/dq = gamma r P(v) + u h + s      dS/dgamma = r T      dS/dz = r P(g) - gamma r^2 T h / n
//     where g = u q - gamma r (mean(q h) v + mean(v h) q)

#include <cmath>
#include <cstdint>
#include <vector>

typedef std::int64_t Int;

template <class R> struct Lanes {
    static constexpr Int count = 64 / sizeof(R);
    typedef R type __attribute__((vector_size(64), aligned(sizeof(R)), may_alias));
};

template <class R> using V = typename Lanes<R>::type;

template <class R> static inline V<R> load(const R *at) { return *(const V<R> *)at; }
template <class R> static inline void store(R *at, V<R> value) { *(V<R> *)at = value; }

// Sums over an image's positions are made row by row, so that rounding stays small.

template <class R>
static void forward(const R *z, const R *gamma, const R *beta, R *p, R *mean, R *rstd, Int images, Int height,
                    Int width, Int channels, double eps) {
    const Int row = width * channels, lanes = Lanes<R>::count;
    const R n = height * width;
    for (Int b = 0; b < images; b++, z += height * row, p += height * row / 4, mean += channels, rstd += channels)
        for (Int c = 0; c < channels; c += lanes) {
            V<R> sum = {}, squares = {};
            for (Int i = 0; i < height; i++) {
                V<R> part = {};
                for (Int j = 0; j < width; j++) part += load(z + i * row + j * channels + c);
                sum += part;
            }
            const V<R> m = sum / n;
            for (Int i = 0; i < height; i++) {
                V<R> part = {};
                for (Int j = 0; j < width; j++) {
                    const V<R> d = load(z + i * row + j * channels + c) - m;
                    part += d * d;
                }
                squares += part;
            }
            V<R> r;
            for (Int l = 0; l < lanes; l++) r[l] = 1 / std::sqrt(squares[l] / n + (R)eps);
            store(mean + c, m);
            store(rstd + c, r);
            const V<R> slope = load(gamma + c) * r, offset = load(beta + c) - slope * m, zero = {};
            for (Int i = 0; i < height; i += 2)
                for (Int j = 0; j < width; j += 2) {
                    const R *at = z + i * row + j * channels + c;
                    V<R> total = {};
                    for (Int k = 0; k < 4; k++) {
                        const V<R> a = load(at + (k / 2) * row + (k % 2) * channels) * slope + offset;
                        total += a > zero ? a : zero;
                    }
                    store(p + i / 2 * (row / 2) + j / 2 * channels + c, total * (R)0.25);
                }
        }
}

template <class R>
static void backward(const R *dp, const R *z, const R *mean, const R *rstd, const R *gamma, const R *beta, R *dz,
                     R *dgamma, R *dbeta, Int images, Int height, Int width, Int channels) {
    const Int row = width * channels, lanes = Lanes<R>::count;
    const R n = height * width;
    for (Int b = 0; b < images; b++, z += height * row, dz += height * row, dp += height * row / 4, mean += channels,
             rstd += channels)
        for (Int c = 0; c < channels; c += lanes) {
            const V<R> m = load(mean + c), r = load(rstd + c), zero = {};
            const V<R> slope = load(gamma + c) * r, offset = load(beta + c) - slope * m;
            V<R> q1 = {}, qz = {};
            for (Int i = 0; i < height; i += 2) {
                V<R> part1 = {}, partz = {};
                for (Int j = 0; j < width; j += 2) {
                    const V<R> d = load(dp + i / 2 * (row / 2) + j / 2 * channels + c) * (R)0.25;
                    for (Int k = 0; k < 4; k++) {
                        const V<R> here = load(z + (i + k / 2) * row + (j + k % 2) * channels + c);
                        const V<R> q = here * slope + offset > zero ? d : zero;
                        part1 += q;
                        partz += q * (here - m);
                    }
                }
                q1 += part1;
                qz += partz;
            }
            const V<R> qh = qz * r;
            store(dgamma + c, load(dgamma + c) + qh);
            store(dbeta + c, load(dbeta + c) + q1);
            const V<R> level = q1 / n, tilt = qh * r / n;
            for (Int i = 0; i < height; i += 2)
                for (Int j = 0; j < width; j += 2) {
                    const V<R> d = load(dp + i / 2 * (row / 2) + j / 2 * channels + c) * (R)0.25;
                    for (Int k = 0; k < 4; k++) {
                        const Int at = (i + k / 2) * row + (j + k % 2) * channels + c;
                        const V<R> here = load(z + at);
                        const V<R> q = here * slope + offset > zero ? d : zero;
                        store(dz + at, slope * (q - level - (here - m) * tilt));
                    }
                }
        }
}

template <class R>
static void twice(const R *v, const R *u, const R *s, const R *dp, const R *z, const R *mean, const R *rstd,
                  const R *gamma, const R *beta, R *gdp, R *gz, R *ggamma, Int images, Int height, Int width,
                  Int channels) {
    const Int row = width * channels, lanes = Lanes<R>::count;
    const R n = height * width;
    for (Int b = 0; b < images; b++, z += height * row, v += height * row, gz += height * row,
             dp += height * row / 4, gdp += height * row / 4, mean += channels, rstd += channels)
        for (Int c = 0; c < channels; c += lanes) {
            const V<R> m = load(mean + c), r = load(rstd + c), g = load(gamma + c), zero = {};
            const V<R> slope = g * r, offset = load(beta + c) - slope * m, us = load(u + c), ss = load(s + c);
            V<R> q1 = {}, v1 = {}, qz = {}, vz = {}, qv = {};
            for (Int i = 0; i < height; i += 2) {
                V<R> pq1 = {}, pv1 = {}, pqz = {}, pvz = {}, pqv = {};
                for (Int j = 0; j < width; j += 2) {
                    const V<R> d = load(dp + i / 2 * (row / 2) + j / 2 * channels + c) * (R)0.25;
                    for (Int k = 0; k < 4; k++) {
                        const Int at = (i + k / 2) * row + (j + k % 2) * channels + c;
                        const V<R> here = load(z + at), there = load(v + at), away = here - m;
                        const V<R> q = here * slope + offset > zero ? d : zero;
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
            store(ggamma + c, load(ggamma + c) + r * t);
            // dS/dz = r (by_q q + by_v v - level - h tilt)
            const V<R> by_q = us - slope * vh, by_v = -slope * qh;
            const V<R> level = by_q * mq + by_v * mv;
            const V<R> tilt = by_q * qh + by_v * vh + slope * t / n;
            for (Int i = 0; i < height; i += 2)
                for (Int j = 0; j < width; j += 2) {
                    const Int pooled = i / 2 * (row / 2) + j / 2 * channels + c;
                    const V<R> d = load(dp + pooled) * (R)0.25;
                    V<R> total = {};
                    for (Int k = 0; k < 4; k++) {
                        const Int at = (i + k / 2) * row + (j + k % 2) * channels + c;
                        const V<R> here = load(z + at), there = load(v + at), h = (here - m) * r;
                        const auto open = here * slope + offset > zero;
                        const V<R> q = open ? d : zero;
                        total += open ? slope * (there - mv - h * vh) + us * h + ss : zero;
                        store(gz + at, r * (by_q * q + by_v * there - level - h * tilt));
                    }
                    store(gdp + pooled, total * (R)0.25);
                }
        }
}

// The gradient of a 3x3 convolution with respect to images of few channels. g has `outputs` channels and is as large as
// the images plus 2 (padding - 1); the weights lie (output, row, column, channel) with zeros up to a multiple of lanes.
template <class R, int channels>
static void image(const R *g, const R *weights, R *dx, Int images, Int height, Int width, Int outputs, Int padding) {
    constexpr Int lanes = Lanes<R>::count, vectors = (9 * channels + lanes - 1) / lanes, padded = vectors * lanes;
    const Int tall = height + 2 * padding - 2, wide = width + 2 * padding - 2, positions = tall * wide;
    constexpr Int block = 4;
    std::vector<R> shares(padded * (positions + block));
    for (Int b = 0; b < images; b++, g += positions * outputs) {
        // What each position of g gives to each of the nine pixels around it ...
        for (Int at = 0; at < positions; at += block) {
            const Int count = positions - at < block ? positions - at : block;
            V<R> total[block][vectors] = {};
            for (Int o = 0; o < outputs; o++)
                for (Int v = 0; v < vectors; v++) {
                    const V<R> by = load(weights + o * padded + v * lanes);
                    for (Int k = 0; k < block; k++) total[k][v] += g[(at + (k < count ? k : 0)) * outputs + o] * by;
                }
            for (Int k = 0; k < block; k++)
                for (Int v = 0; v < vectors; v++) store(&shares[(at + k) * padded + v * lanes], total[k][v]);
        }
        // ... and what each pixel gets.
        for (Int i = 0; i < height; i++)
            for (Int j = 0; j < width; j++, dx += channels) {
                R total[channels] = {};
                for (Int tap = 0; tap < 9; tap++) {
                    const Int y = i + padding - tap / 3, x = j + padding - tap % 3;
                    if (y < 0 || y >= tall || x < 0 || x >= wide) continue;
                    const R *share = &shares[(y * wide + x) * padded + tap * channels];
                    for (int c = 0; c < channels; c++) total[c] += share[c];
                }
                for (int c = 0; c < channels; c++) dx[c] = total[c];
            }
    }
}

#define EXPORT(R)                                                                                                      \
    extern "C" void forward_##R(const R *z, const R *gamma, const R *beta, R *p, R *mean, R *rstd, Int images,         \
                                Int height, Int width, Int channels, double eps) {                                     \
        forward(z, gamma, beta, p, mean, rstd, images, height, width, channels, eps);                                  \
    }                                                                                                                  \
    extern "C" void backward_##R(const R *dp, const R *z, const R *mean, const R *rstd, const R *gamma, const R *beta, \
                                 R *dz, R *dgamma, R *dbeta, Int images, Int height, Int width, Int channels) {        \
        backward(dp, z, mean, rstd, gamma, beta, dz, dgamma, dbeta, images, height, width, channels);                  \
    }                                                                                                                  \
    extern "C" void twice_##R(const R *v, const R *u, const R *s, const R *dp, const R *z, const R *mean,              \
                              const R *rstd, const R *gamma, const R *beta, R *gdp, R *gz, R *ggamma, Int images,      \
                              Int height, Int width, Int channels) {                                                   \
        twice(v, u, s, dp, z, mean, rstd, gamma, beta, gdp, gz, ggamma, images, height, width, channels);              \
    }                                                                                                                  \
    extern "C" void image_##R(const R *g, const R *weights, R *dx, Int images, Int height, Int width, Int outputs,     \
                              Int padding, Int channels) {                                                             \
        if (channels == 1) image<R, 1>(g, weights, dx, images, height, width, outputs, padding);                       \
        if (channels == 3) image<R, 3>(g, weights, dx, images, height, width, outputs, padding);                       \
    }
EXPORT(float)
EXPORT(double)
