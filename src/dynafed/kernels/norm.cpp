// Group norm, the sum with a shortcut, (leaky) ReLU and 2x2 pooling in one: forward, backward, and the backward of the
// backward. Images lie channels last (height, width, channel); any number of channels and groups, any size.
//
// Per image and group, with n values, mean m, r = 1 / sqrt(var + eps):
//     h = (z - m) r      a = gamma h + beta + x      p = pool(a > 0 ? a : low a)
// Backward, with q = dp/da dp, w = gamma q and P(v) = v - mean(v) - h mean(v h):
//     dz = r P(w)      dx = q      dgamma = sum q h      dbeta = sum q
// Backward of that, for S = <v, dz> + <t, dx> + <u, dgamma> + <s, dbeta>, with T = <v, P(w)>:
//     dS/dq = gamma r P(v) + u h + s + t      dS/dgamma = r <q, P(v)>      dS/dz = r P(g) - r^2 T h / n
//     where g = u q - r (mean(w h) v + mean(v h) w)
// Without groups there is no norm: h = z and P(v) = v.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

typedef std::int64_t Int;

enum Pool { NONE, MEAN, MAX };

template <class R, int lanes> using V = typename Vector<R, lanes>::type;

template <int lanes, class R> inline V<R, lanes> load(const R *at) { return Vector<R, lanes>::load(at); }
template <int lanes, class R> inline void store(R *at, const V<R, lanes> &value) { Vector<R, lanes>::store(at, value); }

// Calls `done` with the first of some channels, for as many at a time as a vector has lanes, the last ones for fewer.
template <class R, class F> void by_lanes(Int channels, F done) {
    constexpr int whole = 64 / sizeof(R);
    Int c = 0;
    for (; c + whole <= channels; c += whole) done(std::integral_constant<int, whole>(), c);
    for (; c + 4 <= channels; c += 4) done(std::integral_constant<int, 4>(), c);
    for (; c < channels; c++) done(std::integral_constant<int, 1>(), c);
}

// Sums over positions, made row by row so that rounding stays small.
template <class R, int lanes, int count> struct Sums {
    V<R, lanes> row[count] = {}, total[count] = {};

    void end_row() {
        for (int k = 0; k < count; k++) total[k] += row[k], row[k] = V<R, lanes>{};
    }
};

struct Shape {
    Int height, width, channels, groups;

    Int positions() const { return height * width; }

    // In each channel's place, the mean over its group, of sums over positions; zero without a norm.
    template <class R> void group_means(R *sums) const {
        const Int each = groups ? channels / groups : channels;
        for (Int c = 0; c < channels; c += each) {
            R total = 0;
            for (Int k = c; k < c + each; k++) total += sums[k];
            for (Int k = c; k < c + each; k++) sums[k] = groups ? total / (R)(each * positions()) : 0;
        }
    }

    // Calls `done` with each window of the pooling: its positions, and where its result lies. Positions that are in no
    // window come alone. Then `end_row`.
    template <Pool pool, class F, class G> void each_window(F done, G end_row) const {
        constexpr Int side = pool == NONE ? 1 : 2;
        const Int row = width * channels, wide = width / side;
        for (Int i = 0; i < height; i += side) {
            for (Int j = 0; j < width; j += side) {
                const Int at = i * row + j * channels;
                if (i + side <= height && j + side <= width) {
                    const Int window[] = {at, at + channels, at + row, at + row + channels};
                    done(std::true_type(), window, (i / side * wide + j / side) * channels);
                } else
                    for (Int y = i; y < height && y < i + side; y++)
                        for (Int x = j; x < width && x < j + side; x++) {
                            const Int alone[] = {y * row + x * channels};
                            done(std::false_type(), alone, (Int)0);
                        }
            }
            end_row();
        }
    }
};

// What all derivatives of an image need.
template <class R> struct Given {
    const R *z, *x, *mean, *rstd, *gamma, *beta;
    R low;
};

// Some channels of an image. What is found for each channel lies in arrays of one number a channel.
template <class R, int lanes, Pool pool> struct Part {
    typedef V<R, lanes> Vec;
    static constexpr int count = pool == NONE ? 1 : 4;
    typedef std::true_type Inside;
    const Shape &shape;
    const Int c;
    const R *z, *x;
    const R low;
    Vec m, r, gamma, slope, offset;

    Part(const Shape &shape, Int c, const Given<R> &given)
        : shape(shape), c(c), z(given.z + c), x(given.x ? given.x + c : nullptr), low(given.low),
          m(load<lanes>(given.mean + c)), r(load<lanes>(given.rstd + c)), gamma(load<lanes>(given.gamma + c)) {
        slope = gamma * r;
        offset = load<lanes>(given.beta + c) - slope * m;
    }

    Vec before(Int at) const {
        const Vec a = load<lanes>(z + at) * slope + offset;
        return x ? a + load<lanes>(x + at) : a;
    }

    Vec away(Int at) const { return load<lanes>(z + at) - m; }

    Vec activated(Vec a) const { return pick(a > (R)0, a, a * low); }

    Vec pooled(const Int *window) const {
        Vec result = activated(before(window[0]));
        for (int k = 1; k < count; k++) {
            const Vec one = activated(before(window[k]));
            if (pool == MAX)
                result = pick(better(one, result), one, result);
            else
                result += one;
        }
        return pool == MEAN ? result * (R)0.25 : result;
    }

    // The derivative of a window's result by what was before the activation.
    void derivative(const Int *window, Vec *by) const {
        const Vec one = Vec{} + (pool == MEAN ? (R)0.25 : (R)1), less = one * low, zero = {};
        Vec best = {};
        for (int k = 0; k < count; k++) {
            const Vec a = before(window[k]);
            by[k] = pick(a > (R)0, one, less);
            if (pool != MAX) continue;
            const Vec now = activated(a);
            if (k) {
                const auto is = better(now, best);
                for (int other = 0; other < k; other++) by[other] = pick(is, zero, by[other]);
                by[k] = pick(is, by[k], zero);
                best = pick(is, now, best);
            } else
                best = now;
        }
    }

    static auto better(Vec one, Vec best) { return (one > best) | (one != one); } // the first of equals, as in torch

    void derivative_or_none(Inside, const Int *window, Vec *by) const { derivative(window, by); }
    void derivative_or_none(std::false_type, const Int *, Vec *by) const { by[0] = Vec{}; }

    void forward(R *p) const {
        auto done = [&](auto inside, const Int *at, Int to) {
            if (inside) store<lanes>(p + to + c, pooled(at));
        };
        shape.template each_window<pool>(done, [] {});
    }

    void backward_sums(const R *dp, R *dgamma, R *dbeta, R *level, R *tilt) const {
        Sums<R, lanes, 2> sums;
        auto done = [&](auto inside, const Int *at, Int to) {
            if (!inside) return;
            Vec by[4];
            derivative_or_none(inside, at, by);
            const Vec d = load<lanes>(dp + to + c);
            for (int k = 0; k < count; k++) {
                sums.row[0] += d * by[k];
                sums.row[1] += d * by[k] * away(at[k]);
            }
        };
        shape.template each_window<pool>(done, [&] { sums.end_row(); });
        const Vec q1 = sums.total[0], qh = sums.total[1] * r;
        store<lanes>(dbeta + c, load<lanes>(dbeta + c) + q1);
        store<lanes>(dgamma + c, load<lanes>(dgamma + c) + qh);
        store<lanes>(level + c, gamma * q1);
        store<lanes>(tilt + c, gamma * qh);
    }

    void backward(const R *dp, R *dz, R *dx, const R *level, const R *tilt) const {
        const Vec flat = load<lanes>(level + c) * r, steep = load<lanes>(tilt + c) * r * r;
        auto done = [&](auto inside, const Int *at, Int to) {
            Vec q[4];
            derivative_or_none(inside, at, q);
            const Vec d = inside ? load<lanes>(dp + to + c) : Vec{};
            for (int k = 0; k < (inside ? count : 1); k++) {
                q[k] *= d;
                store<lanes>(dz + at[k] + c, slope * q[k] - flat - away(at[k]) * steep);
                if (dx) store<lanes>(dx + at[k] + c, q[k]);
            }
        };
        shape.template each_window<pool>(done, [] {});
    }

    // Of q, v, q h, v h and q v.
    void twice_sums(const R *dp, const R *v, R *const *sum) const {
        Sums<R, lanes, 5> sums;
        auto done = [&](auto inside, const Int *at, Int to) {
            Vec q[4];
            derivative_or_none(inside, at, q);
            const Vec d = inside ? load<lanes>(dp + to + c) : Vec{};
            for (int k = 0; k < (inside ? count : 1); k++) {
                const Vec there = load<lanes>(v + at[k] + c), h = away(at[k]) * r;
                q[k] *= d;
                sums.row[0] += q[k];
                sums.row[1] += there;
                sums.row[2] += q[k] * h;
                sums.row[3] += there * h;
                sums.row[4] += q[k] * there;
            }
        };
        shape.template each_window<pool>(done, [&] { sums.end_row(); });
        for (int k = 0; k < 5; k++) store<lanes>(sum[k] + c, sums.total[k]);
    }

    void twice(const R *dp, const R *v, const R *t, const R *u, const R *s, const R *mv, const R *mvh, const R *mwh,
               const R *level, const R *tilt, R *gdp, R *gz) const {
        const Vec flat = load<lanes>(level + c), steep = load<lanes>(tilt + c), us = load<lanes>(u + c);
        const Vec v1 = load<lanes>(mv + c), vh = load<lanes>(mvh + c), ss = load<lanes>(s + c);
        const Vec by_q = us - slope * vh, by_v = -r * load<lanes>(mwh + c);
        auto done = [&](auto inside, const Int *at, Int to) {
            Vec by[4], total = {};
            derivative_or_none(inside, at, by);
            const Vec d = inside ? load<lanes>(dp + to + c) : Vec{};
            for (int k = 0; k < (inside ? count : 1); k++) {
                const Vec there = load<lanes>(v + at[k] + c), h = away(at[k]) * r;
                Vec along = slope * (there - v1 - h * vh) + us * h + ss;
                if (t) along += load<lanes>(t + at[k] + c);
                total += by[k] * along;
                store<lanes>(gz + at[k] + c, r * (by_q * (by[k] * d) + by_v * there - flat - h * steep));
            }
            if (inside) store<lanes>(gdp + to + c, total);
        };
        shape.template each_window<pool>(done, [] {});
    }
};

template <class R, int lanes, class F> void sum(const Shape &shape, const R *z, Int c, R *to, F value) {
    Sums<R, lanes, 1> sums;
    for (Int i = 0; i < shape.height; i++, sums.end_row())
        for (Int j = 0; j < shape.width; j++)
            sums.row[0] += value(load<lanes>(z + (i * shape.width + j) * shape.channels + c));
    store<lanes>(to + c, sums.total[0]);
}

template <class R> void statistics(const Shape &shape, const R *z, R *mean, R *rstd, double eps) {
    if (!shape.groups) {
        std::fill_n(mean, shape.channels, (R)0);
        std::fill_n(rstd, shape.channels, (R)1);
        return;
    }
    by_lanes<R>(shape.channels, [&](auto some, Int c) {
        constexpr int lanes = decltype(some)::value;
        sum<R, lanes>(shape, z, c, mean, [](V<R, lanes> here) { return here; });
    });
    shape.group_means(mean);
    by_lanes<R>(shape.channels, [&](auto some, Int c) {
        constexpr int lanes = decltype(some)::value;
        const V<R, lanes> m = load<lanes>(mean + c);
        sum<R, lanes>(shape, z, c, rstd, [m](V<R, lanes> here) { return (here - m) * (here - m); });
    });
    shape.group_means(rstd);
    for (Int c = 0; c < shape.channels; c++) rstd[c] = 1 / std::sqrt(rstd[c] + (R)eps);
}

template <Pool pool, class R> struct Image {
    const Shape &shape;
    const Given<R> given;

    template <class F> void each(F done) const {
        by_lanes<R>(shape.channels, [&](auto some, Int c) {
            done(Part<R, decltype(some)::value, pool>(shape, c, given));
        });
    }

    void forward(R *p) const {
        each([&](const auto &part) { part.forward(p); });
    }

    void backward(const R *dp, R *dz, R *dx, R *dgamma, R *dbeta) const {
        std::vector<R> work(2 * shape.channels);
        R *level = work.data(), *tilt = level + shape.channels;
        if (shape.groups) each([&](const auto &part) { part.backward_sums(dp, dgamma, dbeta, level, tilt); });
        shape.group_means(level);
        shape.group_means(tilt);
        each([&](const auto &part) { part.backward(dp, dz, dx, level, tilt); });
    }

    void twice(const R *v, const R *t, const R *u, const R *s, const R *dp, R *gdp, R *gz, R *ggamma) const {
        const Int channels = shape.channels;
        std::vector<R> work(12 * channels);
        R *sum[5], *mean[5], *level = &work[10 * channels], *tilt = level + channels;
        for (int k = 0; k < 5; k++) sum[k] = &work[k * channels], mean[k] = sum[k] + 5 * channels;
        each([&](const auto &part) { part.twice_sums(dp, v, sum); });
        for (int k = 0; k < 5; k++) { // of w instead of q
            for (Int c = 0; c < channels; c++) mean[k][c] = k % 2 ? sum[k][c] : given.gamma[c] * sum[k][c];
            shape.group_means(mean[k]);
        }
        const R *mw = mean[0], *mv = mean[1], *mwh = mean[2], *mvh = mean[3], *mwv = mean[4], *rstd = given.rstd;
        for (Int c = 0; c < channels; c++) {
            ggamma[c] += rstd[c] * (sum[4][c] - sum[0][c] * mv[c] - sum[2][c] * mvh[c]);
            const R by_q = u[c] - rstd[c] * given.gamma[c] * mvh[c], by_v = -rstd[c] * mwh[c];
            level[c] = by_q * sum[0][c] + by_v * sum[1][c];
            tilt[c] = by_q * sum[2][c] + by_v * sum[3][c];
        }
        shape.group_means(level);
        shape.group_means(tilt);
        for (Int c = 0; c < channels; c++) tilt[c] += rstd[c] * (mwv[c] - mw[c] * mv[c] - mwh[c] * mvh[c]);
        each([&](const auto &part) { part.twice(dp, v, t, u, s, mv, mvh, mwh, level, tilt, gdp, gz); });
    }
};

// All images, one after the other: `done` gets one, and how far its numbers, its pooled ones, and those of its channels
// are from the first image's.
template <class R, class F>
void each_image(const Shape &shape, Int images, Int pool, const Given<R> &all, F done) {
    const Int side = pool == NONE ? 1 : 2, size = shape.height * shape.width * shape.channels;
    const Int pooled = shape.height / side * (shape.width / side) * shape.channels;
    for (Int b = 0; b < images; b++) {
        const Int at = b * size, to = b * pooled, own = b * shape.channels;
        const R *x = all.x ? all.x + at : nullptr;
        const Given<R> given = {all.z + at, x, all.mean + own, all.rstd + own, all.gamma, all.beta, all.low};
        if (pool == NONE) done(Image<NONE, R>{shape, given}, at, to, own);
        if (pool == MEAN) done(Image<MEAN, R>{shape, given}, at, to, own);
        if (pool == MAX) done(Image<MAX, R>{shape, given}, at, to, own);
    }
}

} // namespace

#define EXPORT(R)                                                                                                      \
    extern "C" void norm_forward_##R(const R *z, const R *x, const R *gamma, const R *beta, R *p, R *mean, R *rstd,    \
                                     Int images, Int height, Int width, Int channels, Int groups, Int pool,            \
                                     double low, double eps) {                                                         \
        const Shape shape = {height, width, channels, groups};                                                         \
        const Given<R> given = {z, x, mean, rstd, gamma, beta, (R)low};                                                \
        each_image(shape, images, pool, given, [&](const auto &image, Int at, Int to, Int own) {                       \
            statistics(shape, z + at, mean + own, rstd + own, eps);                                                    \
            image.forward(p + to);                                                                                     \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void norm_backward_##R(const R *dp, const R *z, const R *x, const R *mean, const R *rstd,               \
                                      const R *gamma, const R *beta, R *dz, R *dx, R *dgamma, R *dbeta, Int images,    \
                                      Int height, Int width, Int channels, Int groups, Int pool, double low) {         \
        const Shape shape = {height, width, channels, groups};                                                         \
        const Given<R> given = {z, x, mean, rstd, gamma, beta, (R)low};                                                \
        each_image(shape, images, pool, given, [&](const auto &image, Int at, Int to, Int) {                           \
            image.backward(dp + to, dz + at, dx ? dx + at : nullptr, dgamma, dbeta);                                   \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void norm_twice_##R(const R *v, const R *t, const R *u, const R *s, const R *dp, const R *z,            \
                                   const R *x, const R *mean, const R *rstd, const R *gamma, const R *beta, R *gdp,    \
                                   R *gz, R *ggamma, Int images, Int height, Int width, Int channels, Int groups,      \
                                   Int pool, double low) {                                                             \
        const Shape shape = {height, width, channels, groups};                                                         \
        const Given<R> given = {z, x, mean, rstd, gamma, beta, (R)low};                                                \
        each_image(shape, images, pool, given, [&](const auto &image, Int at, Int to, Int) {                           \
            image.twice(v + at, t ? t + at : nullptr, u, s, dp + to, gdp + to, gz + at, ggamma);                       \
        });                                                                                                            \
    }
EXPORT(float)
EXPORT(double)
