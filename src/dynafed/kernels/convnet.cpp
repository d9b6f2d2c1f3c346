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

#include <algorithm>
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
    V<R> r;
    for (Int l = 0; l < Lanes<R>::count; l++) r[l] = 1 / std::sqrt(squares[l] / n + (R)eps);
    store(mean, m);
    store(rstd, r);
    const V<R> slope = load(gamma) * r, offset = load(beta) - slope * m, zero = {};
    for (Int i = 0; i < height; i += 2)
        for (Int j = 0; j < width; j += 2) {
            V<R> total = {};
            for (Int k = 0; k < 4; k++) {
                const V<R> a = load(z + (i + k / 2) * zs.row + (j + k % 2) * zs.step) * slope + offset;
                total += a > zero ? a : zero;
            }
            store(p + i / 2 * ps.row + j / 2 * ps.step, total * (R)0.25);
        }
}

template <class R>
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
                const V<R> q = here * slope + offset > zero ? d : zero;
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
                const V<R> q = here * slope + offset > zero ? d : zero;
                store(dz + at, slope * (q - level - (here - m) * tilt));
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
                const V<R> q = open ? d : zero;
                total += open ? slope * (there - mv - h * vh) + us * h + ss : zero;
                store(gz + at, r * (by_q * q + by_v * there - level - h * tilt));
                if (dz) store(dz + at, slope * (q - mq - h * qh));
            }
            store(gdp + pooled, total * (R)0.25);
        }
}

// The same for all channels of all images.

template <class R>
static void forward(const R *z, const R *gamma, const R *beta, R *p, R *mean, R *rstd, Int images, Int height,
                    Int width, Int channels, double eps) {
    const Strides zs = {width * channels, channels}, ps = {width / 2 * channels, channels};
    for (Int b = 0; b < images; b++, z += height * zs.row, p += height / 2 * ps.row, mean += channels, rstd += channels)
        for (Int c = 0; c < channels; c += Lanes<R>::count)
            norm_forward(z + c, zs, p + c, ps, gamma + c, beta + c, mean + c, rstd + c, height, width, eps);
}

template <class R>
static void backward(const R *dp, const R *z, const R *mean, const R *rstd, const R *gamma, const R *beta, R *dz,
                     R *dgamma, R *dbeta, Int images, Int height, Int width, Int channels) {
    const Strides zs = {width * channels, channels}, ps = {width / 2 * channels, channels};
    for (Int b = 0; b < images; b++, z += height * zs.row, dz += height * zs.row, dp += height / 2 * ps.row,
             mean += channels, rstd += channels)
        for (Int c = 0; c < channels; c += Lanes<R>::count)
            norm_backward(dp + c, ps, z + c, dz + c, zs, mean + c, rstd + c, gamma + c, beta + c, dgamma + c,
                          dbeta + c, height, width);
}

template <class R>
static void twice(const R *v, const R *u, const R *s, const R *dp, const R *z, const R *mean, const R *rstd,
                  const R *gamma, const R *beta, R *gdp, R *gz, R *ggamma, Int images, Int height, Int width,
                  Int channels) {
    const Strides zs = {width * channels, channels}, ps = {width / 2 * channels, channels};
    for (Int b = 0; b < images; b++, z += height * zs.row, v += height * zs.row, gz += height * zs.row,
             dp += height / 2 * ps.row, gdp += height / 2 * ps.row, mean += channels, rstd += channels)
        for (Int c = 0; c < channels; c += Lanes<R>::count)
            norm_twice(v + c, u + c, s + c, dp + c, gdp + c, ps, z + c, gz + c, (R *)nullptr, zs, mean + c, rstd + c,
                       gamma + c, beta + c, ggamma + c, height, width);
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

template <class R, int channels>
static void first_forward(Few<R, channels> few, const R *x, const R *w, const R *bias, const R *gamma, const R *beta,
                          R *p, R *mean, R *rstd, Int images, double eps) {
    const Int lanes = Lanes<R>::count, outputs = few.outputs;
    const Strides zs = {few.wide * lanes, lanes}, ps = {few.wide / 2 * outputs, outputs};
    std::vector<R> image(few.bordered), z(few.positions * lanes);
    for (Int b = 0; b < images; b++, x += few.height * few.width * channels, p += few.positions / 4 * outputs,
             mean += outputs, rstd += outputs) {
        few.border(x, image.data());
        for (Int c = 0; c < outputs; c += lanes) {
            few.convolve(image.data(), w + c, bias + c, z.data());
            norm_forward(z.data(), zs, p + c, ps, gamma + c, beta + c, mean + c, rstd + c, few.tall, few.wide, eps);
        }
    }
}

template <class R, int channels>
static void first_backward(Few<R, channels> few, const R *dp, const R *x, const R *w, const R *bias, const R *mean,
                           const R *rstd, const R *gamma, const R *beta, R *dx, R *dw, R *db, R *dgamma, R *dbeta,
                           Int images) {
    const Int lanes = Lanes<R>::count, outputs = few.outputs, pixels = few.height * few.width * channels;
    const Strides zs = {few.wide * lanes, lanes}, ps = {few.wide / 2 * outputs, outputs};
    std::vector<R> image(few.bordered), z(few.positions * lanes), dz(z.size()), shares(dx ? few.all_shares : 0);
    const std::vector<R> rows = few.rows(w);
    for (Int b = 0; b < images; b++, x += pixels, dp += few.positions / 4 * outputs, mean += outputs, rstd += outputs) {
        few.border(x, image.data());
        for (Int c = 0; c < outputs; c += lanes) {
            few.convolve(image.data(), w + c, bias + c, z.data());
            norm_backward(dp + c, ps, z.data(), dz.data(), zs, mean + c, rstd + c, gamma + c, beta + c, dgamma + c,
                          dbeta + c, few.tall, few.wide);
            few.by_weights(dz.data(), image.data(), dw + c, db + c);
            if (dx) few.spread(dz.data(), &rows[c * few.padded], shares.data(), c > 0);
        }
        if (dx) few.gather(shares.data(), dx + b * pixels);
    }
}

template <class R, int channels>
static void first_twice(Few<R, channels> few, const R *vx, const R *vw, const R *vb, const R *u, const R *s,
                        const R *dp, const R *x, const R *w, const R *bias, const R *mean, const R *rstd,
                        const R *gamma, const R *beta, R *gdp, R *gx, R *gw, R *gb, R *ggamma, Int images) {
    const Int lanes = Lanes<R>::count, outputs = few.outputs, pixels = few.height * few.width * channels;
    const Strides zs = {few.wide * lanes, lanes}, ps = {few.wide / 2 * outputs, outputs};
    const Int pooled = few.positions / 4 * outputs;
    std::vector<R> image(few.bordered), other(few.bordered), shares(gx ? few.all_shares : 0);
    std::vector<R> z(few.positions * lanes), v(z.size()), gz(z.size()), dz(z.size());
    const std::vector<R> rows = few.rows(w), vrows = few.rows(vw);
    for (Int b = 0; b < images; b++, x += pixels, dp += pooled, gdp += pooled, mean += outputs, rstd += outputs) {
        few.border(x, image.data());
        if (vx) few.border(vx + b * pixels, other.data());
        for (Int c = 0; c < outputs; c += lanes) {
            few.convolve(image.data(), w + c, bias + c, z.data());
            few.convolve(image.data(), vw + c, vb + c, v.data());
            if (vx) few.convolve(other.data(), w + c, v.data());
            norm_twice(v.data(), u + c, s + c, dp + c, gdp + c, ps, z.data(), gz.data(), dz.data(), zs, mean + c,
                       rstd + c, gamma + c, beta + c, ggamma + c, few.tall, few.wide);
            few.by_weights(gz.data(), image.data(), gw + c, gb + c);
            if (vx) few.by_weights(dz.data(), other.data(), gw + c, (R *)nullptr);
            if (gx) {
                few.spread(gz.data(), &rows[c * few.padded], shares.data(), c > 0);
                few.spread(dz.data(), &vrows[c * few.padded], shares.data(), true);
            }
        }
        if (gx) few.gather(shares.data(), gx + b * pixels);
    }
}

#define FEW(R, function, ...)                                                                                          \
    if (channels == 1) function(Few<R, 1>{height, width, outputs, padding}, __VA_ARGS__);                              \
    if (channels == 3) function(Few<R, 3>{height, width, outputs, padding}, __VA_ARGS__)

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
    extern "C" void first_forward_##R(const R *x, const R *w, const R *bias, const R *gamma, const R *beta, R *p,      \
                                      R *mean, R *rstd, Int images, Int height, Int width, Int channels, Int outputs,  \
                                      Int padding, double eps) {                                                       \
        FEW(R, first_forward, x, w, bias, gamma, beta, p, mean, rstd, images, eps);                                    \
    }                                                                                                                  \
    extern "C" void first_backward_##R(const R *dp, const R *x, const R *w, const R *bias, const R *mean,              \
                                       const R *rstd, const R *gamma, const R *beta, R *dx, R *dw, R *db, R *dgamma,   \
                                       R *dbeta, Int images, Int height, Int width, Int channels, Int outputs,         \
                                       Int padding) {                                                                  \
        FEW(R, first_backward, dp, x, w, bias, mean, rstd, gamma, beta, dx, dw, db, dgamma, dbeta, images);            \
    }                                                                                                                  \
    extern "C" void first_twice_##R(const R *vx, const R *vw, const R *vb, const R *u, const R *s, const R *dp,        \
                                    const R *x, const R *w, const R *bias, const R *mean, const R *rstd,               \
                                    const R *gamma, const R *beta, R *gdp, R *gx, R *gw, R *gb, R *ggamma, Int images, \
                                    Int height, Int width, Int channels, Int outputs, Int padding) {                   \
        FEW(R, first_twice, vx, vw, vb, u, s, dp, x, w, bias, mean, rstd, gamma, beta, gdp, gx, gw, gb, ggamma,        \
            images);                                                                                                   \
    }
EXPORT(float)
EXPORT(double)
