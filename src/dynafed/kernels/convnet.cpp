// The ConvNet's blocks one by one, for all images of a batch; what they compute is told in blocks.h.

#include "blocks.h"

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
