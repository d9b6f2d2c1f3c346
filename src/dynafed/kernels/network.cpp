// A whole ConvNet, a few images at a time, so that what lies between its layers stays in the cache: its logits, the gradient
// of its loss, and the Hessian's product with a direction. Blocks as in blocks.h, then a linear layer and soft-label
// cross-entropy. The product is the derivative of the gradient along the direction; a dot marks such derivatives:
//     .z = conv(.a, w) + conv(a, .w) + .b      .da = conv_x'(.dz, w) + conv_x'(dz, .w)
//     .dw = conv_w'(.dz, a) + conv_w'(dz, .a)
//
// Convolutions after the first are Winograd's F(4x4, 3x3): a tile of 4x4 outputs and the 6x6 inputs that it depends on
// are polynomials' values at the points 0, p, -p, q, -q and infinity, by rows and by columns. With a' = B^T a B,
// w' = G w G^T and dz' = A dz A^T, each product is 36 matrix products, a quarter of the multiplications:
//     z = A^T (a' w') A      da = B (dz' w'^T) B^T      dw = G^T (a'^T dz') G
// These points round least among those tried: 3 to 6 times as much as the convolution by definition.

#include "blocks.h"

#include <initializer_list>
#include <memory>
#include <new>

namespace {

template <class R> struct Buffer {
    struct Free {
        void operator()(R *at) const { ::operator delete[](at, std::align_val_t(64)); }
    };
    std::unique_ptr<R[], Free> values;

    Buffer() = default;
    explicit Buffer(Int size) : values((R *)::operator new[](size * sizeof(R), std::align_val_t(64))) {}
    R *at(Int offset = 0) const { return values.get() + offset; }
};

constexpr Int POINTS = 6, TILE = 4, MATRICES = POINTS * POINTS;
constexpr double P = 0.625, Q = 1.5, PP = P * P, QQ = Q * Q;

// The transforms of one row.
template <class R> struct Row {
    typedef V<R> Vec;
    static constexpr R p = P, q = Q, pp = PP, qq = QQ, both = PP + QQ, all = PP * QQ;
    static constexpr R at_0 = 1 / (PP * QQ), at_p = 1 / (2 * PP * (PP - QQ)), at_q = 1 / (2 * QQ * (QQ - PP));

    static void from_input(const Vec *d, Vec *h) { // B^T
        const Vec even_p = d[4] - qq * d[2], odd_p = p * (d[3] - qq * d[1]);
        const Vec even_q = d[4] - pp * d[2], odd_q = q * (d[3] - pp * d[1]);
        h[0] = d[4] - both * d[2] + all * d[0];
        h[1] = even_p + odd_p, h[2] = even_p - odd_p;
        h[3] = even_q + odd_q, h[4] = even_q - odd_q;
        h[5] = d[5] - both * d[3] + all * d[1];
    }
    static void to_input(const Vec *h, Vec *d) { // B
        const Vec even_p = h[1] + h[2], odd_p = p * (h[1] - h[2]), even_q = h[3] + h[4], odd_q = q * (h[3] - h[4]);
        d[0] = all * h[0];
        d[1] = all * h[5] - qq * odd_p - pp * odd_q;
        d[2] = -both * h[0] - qq * even_p - pp * even_q;
        d[3] = odd_p + odd_q - both * h[5];
        d[4] = h[0] + even_p + even_q;
        d[5] = h[5];
    }
    static void to_output(const Vec *h, Vec *y) { // A^T
        const Vec even_p = h[1] + h[2], odd_p = p * (h[1] - h[2]), even_q = h[3] + h[4], odd_q = q * (h[3] - h[4]);
        y[0] = h[0] + even_p + even_q;
        y[1] = odd_p + odd_q;
        y[2] = pp * even_p + qq * even_q;
        y[3] = pp * odd_p + qq * odd_q + h[5];
    }
    static void from_output(const Vec *y, Vec *h) { // A
        const Vec even_p = y[0] + pp * y[2], odd_p = p * (y[1] + pp * y[3]);
        const Vec even_q = y[0] + qq * y[2], odd_q = q * (y[1] + qq * y[3]);
        h[0] = y[0];
        h[1] = even_p + odd_p, h[2] = even_p - odd_p;
        h[3] = even_q + odd_q, h[4] = even_q - odd_q;
        h[5] = y[3];
    }
    static void from_weights(const Vec *w, Vec *h) { // G
        const Vec even_p = at_p * (w[0] + pp * w[2]), odd_p = at_p * p * w[1];
        const Vec even_q = at_q * (w[0] + qq * w[2]), odd_q = at_q * q * w[1];
        h[0] = at_0 * w[0];
        h[1] = even_p + odd_p, h[2] = even_p - odd_p;
        h[3] = even_q + odd_q, h[4] = even_q - odd_q;
        h[5] = w[2];
    }
    static void to_weights(const Vec *h, Vec *w) { // G^T
        const Vec even_p = at_p * (h[1] + h[2]), odd_p = at_p * p * (h[1] - h[2]);
        const Vec even_q = at_q * (h[3] + h[4]), odd_q = at_q * q * (h[3] - h[4]);
        w[0] = at_0 * h[0] + even_p + even_q;
        w[1] = odd_p + odd_q;
        w[2] = pp * even_p + qq * even_q + h[5];
    }
};

// The transform of a square by columns, then by rows.
template <class R, int from, int to, void (*along)(const V<R> *, V<R> *)>
inline void transform(const V<R> (&in)[from][from], V<R> (&out)[to][to]) {
    V<R> half[to][from];
    for (int j = 0; j < from; j++) {
        V<R> column[from], found[to];
        for (int i = 0; i < from; i++) column[i] = in[i][j];
        along(column, found);
        for (int i = 0; i < to; i++) half[i][j] = found[i];
    }
    for (int i = 0; i < to; i++) along(half[i], out[i]);
}

// One matrix for each pair of points, in strips of two vectors' columns (one, if there is an odd number of them). They
// lie a little more than their size apart, or they would meet in the same places of the cache.
template <class R> struct Matrices {
    Int rows = 0, wide = 0, strip = 0, apart = 0;
    Buffer<R> buffer;

    Matrices() = default;
    Matrices(Int rows, Int columns)
        : rows(rows), wide((columns / Lanes<R>::count % 2 ? 1 : 2) * Lanes<R>::count), strip(rows * wide),
          apart(rows * columns + Lanes<R>::count), buffer(MATRICES * apart) {}
    R *at(Int matrix, Int row = 0, Int column = 0) const {
        return buffer.at(matrix * apart + column / wide * strip + row * wide + column % wide);
    }
    void clear() { std::fill_n(buffer.at(), MATRICES * apart, (R)0); }

    void put(Int row, Int column, const V<R> (&values)[POINTS][POINTS]) const {
        R *to = at(0, row, column);
        for (Int k = 0; k < MATRICES; k++) store(to + k * apart, values[k / POINTS][k % POINTS]);
    }
    void get(Int row, Int column, V<R> (&values)[POINTS][POINTS]) const {
        const R *from = at(0, row, column);
        for (Int k = 0; k < MATRICES; k++) values[k / POINTS][k % POINTS] = load(from + k * apart);
    }
};

// a (rows x depth) times b (depth x columns), of which a's transpose may be what is given.
template <class R> struct Factors {
    const Matrices<R> &a, &b;
};

template <class R> using Sum = std::initializer_list<Factors<R>>;

template <class R, bool turned, int height, int vectors>
static inline void product_tile(Sum<R> sum, Int k, Int row, Int column, Int depth, const Matrices<R> &to) {
    constexpr Int lanes = Lanes<R>::count, wide = vectors * lanes;
    V<R> total[height][vectors] = {};
    R *out = to.at(k, row, column);
    if (turned)
        for (int i = 0; i < height; i++)
            for (int v = 0; v < vectors; v++) total[i][v] = load(out + i * wide + v * lanes);
    for (const Factors<R> &factors : sum) {
        const R *a = turned ? factors.a.at(k, 0, row) : factors.a.at(k, row), *b = factors.b.at(k, 0, column);
        const Int steps = turned ? depth : wide;
        for (Int from = 0; from < depth; from += steps, a += factors.a.strip - wide)
            for (Int step = 0; step < steps; step++, a += turned ? wide : 1, b += wide) {
                V<R> by[vectors];
                for (int v = 0; v < vectors; v++) by[v] = load(b + v * lanes);
                for (int i = 0; i < height; i++)
                    for (int v = 0; v < vectors; v++) total[i][v] += a[i * (turned ? 1 : wide)] * by[v];
            }
    }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < vectors; v++) store(out + i * wide + v * lanes, total[i][v]);
}

template <class R, bool turned, int vectors>
static void product_strips(Sum<R> sum, Int rows, Int columns, Int depth, const Matrices<R> &to) {
    for (Int k = 0; k < MATRICES; k++)
        for (Int column = 0; column < columns; column += vectors * Lanes<R>::count) {
            Int row = 0;
            for (; row + 8 <= rows; row += 8) product_tile<R, turned, 8, vectors>(sum, k, row, column, depth, to);
            for (; row + 4 <= rows; row += 4) product_tile<R, turned, 4, vectors>(sum, k, row, column, depth, to);
            for (; row < rows; row++) product_tile<R, turned, 1, vectors>(sum, k, row, column, depth, to);
        }
}

// A sum of products. Of transposes (`turned`), it is added to what is there.
template <class R, bool turned>
static void multiply(Sum<R> sum, Int rows, Int columns, Int depth, const Matrices<R> &to) {
    if (to.wide > Lanes<R>::count)
        product_strips<R, turned, 2>(sum, rows, columns, depth, to);
    else
        product_strips<R, turned, 1>(sum, rows, columns, depth, to);
}

// A convolution's weights w' and their transposes.
template <class R> struct Weights {
    Matrices<R> plain, turned;

    Weights() = default;
    Weights(const R *taps, Int size) : plain(transformed(taps, size)) {
        std::vector<R> transposes(9 * size * size);
        for (Int tap = 0; tap < 9; tap++)
            for (Int c = 0; c < size; c++)
                for (Int o = 0; o < size; o++)
                    transposes[(tap * size + o) * size + c] = taps[(tap * size + c) * size + o];
        turned = transformed(transposes.data(), size);
    }

    static Matrices<R> transformed(const R *taps, Int size) {
        Matrices<R> found(size, size);
        V<R> w[3][3], h[POINTS][POINTS];
        for (Int c = 0; c < size; c++)
            for (Int o = 0; o < size; o += Lanes<R>::count) {
                for (Int tap = 0; tap < 9; tap++) w[tap / 3][tap % 3] = load(taps + (tap * size + c) * size + o);
                transform<R, 3, POINTS, Row<R>::from_weights>(w, h);
                found.put(c, o, h);
            }
        return found;
    }
};

// A convolution of a few images, with as many outputs as inputs.
template <class R> struct Convolution {
    static constexpr Int lanes = Lanes<R>::count;
    Int height = 0, width = 0, channels = 0, down = 0, across = 0;
    Weights<R> weights, dot_weights;
    Matrices<R> a, dot_a, dz, dot_dz, dw;

    Convolution() = default;
    Convolution(Int height, Int width, Int channels, Int group, const R *taps, const R *dot_taps)
        : height(height), width(width), channels(channels), down((height + TILE - 1) / TILE),
          across((width + TILE - 1) / TILE), weights(taps, channels), a(tiles(group), channels),
          dz(tiles(group), channels), dw(channels, channels) {
        dw.clear();
        if (!dot_taps) return;
        dot_weights = Weights<R>(dot_taps, channels);
        dot_a = Matrices<R>(tiles(group), channels), dot_dz = Matrices<R>(tiles(group), channels);
    }

    Int tiles(Int images) const { return images * down * across; }
    bool inside(Int i, Int j) const { return i >= 0 && i < height && j >= 0 && j < width; }
    Int place(Int i, Int j) const { return (i * width + j) * channels; }

    // What is done for some channels of each tile of an image: its row in the matrices, its first output, the channel.
    template <class F> void each_tile(Int image, F done) const {
        for (Int i = 0; i < down; i++)
            for (Int j = 0; j < across; j++)
                for (Int c = 0; c < channels; c += lanes) done(tiles(image) + i * across + j, TILE * i, TILE * j, c);
    }

    template <int side> void read(const R *x, Int i, Int j, V<R> (&tile)[side][side]) const {
        for (int k = 0; k < side; k++)
            for (int l = 0; l < side; l++)
                tile[k][l] = inside(i + k, j + l) ? load(x + place(i + k, j + l)) : V<R>{};
    }

    void take_input(Int image, const R *x, const Matrices<R> &to) const {
        each_tile(image, [&](Int row, Int i, Int j, Int c) {
            V<R> tile[POINTS][POINTS], h[POINTS][POINTS];
            read(x + c, i - 1, j - 1, tile);
            transform<R, POINTS, POINTS, Row<R>::from_input>(tile, h);
            to.put(row, c, h);
        });
    }

    void take_output(Int image, const R *x, const Matrices<R> &to) const {
        each_tile(image, [&](Int row, Int i, Int j, Int c) {
            V<R> tile[TILE][TILE], h[POINTS][POINTS];
            read(x + c, i, j, tile);
            transform<R, TILE, POINTS, Row<R>::from_output>(tile, h);
            to.put(row, c, h);
        });
    }

    void give_output(Int image, const Matrices<R> &from, const R *bias, R *z) const {
        each_tile(image, [&](Int row, Int i, Int j, Int c) {
            V<R> tile[TILE][TILE], h[POINTS][POINTS];
            from.get(row, c, h);
            transform<R, POINTS, TILE, Row<R>::to_output>(h, tile);
            for (int k = 0; k < TILE; k++)
                for (int l = 0; l < TILE; l++)
                    if (inside(i + k, j + l)) store(z + place(i + k, j + l) + c, tile[k][l] + load(bias + c));
        });
    }

    void give_input(Int image, const Matrices<R> &from, R *x) const {
        std::fill_n(x, height * width * channels, (R)0);
        each_tile(image, [&](Int row, Int i, Int j, Int c) {
            V<R> tile[POINTS][POINTS], h[POINTS][POINTS];
            from.get(row, c, h);
            transform<R, POINTS, POINTS, Row<R>::to_input>(h, tile);
            for (int k = 0; k < POINTS; k++)
                for (int l = 0; l < POINTS; l++)
                    if (inside(i + k - 1, j + l - 1)) {
                        R *at = x + place(i + k - 1, j + l - 1) + c;
                        store(at, load(at) + tile[k][l]);
                    }
        });
    }

    // Tiles' products with weights, and what they add to the weights' gradient.
    void multiply_tiles(Int images, Sum<R> sum, const Matrices<R> &to) const {
        multiply<R, false>(sum, tiles(images), channels, channels, to);
    }
    void add_weights(Int images, Sum<R> sum) const { multiply<R, true>(sum, channels, channels, tiles(images), dw); }

    void give_weights(R *taps) const {
        V<R> w[3][3], h[POINTS][POINTS];
        for (Int c = 0; c < channels; c++)
            for (Int o = 0; o < channels; o += lanes) {
                dw.get(c, o, h);
                transform<R, POINTS, 3, Row<R>::to_weights>(h, w);
                for (Int tap = 0; tap < 9; tap++)
                    store(taps + (tap * channels + c) * channels + o, w[tap / 3][tap % 3]);
            }
    }
};

struct Sizes {
    Int images, height, width, padding, depth, outputs, classes, group;
    double scale, eps;
};

// A block. What the gradient leaves to the product lies in an image's record, at these places; the rest is a group's.
template <class R> struct Block {
    Int height, width, outputs, apart, step; // channel c of z begins at c * apart, positions are a step apart
    Int z, p, dp, mean, rstd;
    Convolution<R> conv;
    Buffer<R> dz, dot_z, dot_p, dot_dp;

    Int size() const { return height * width * outputs; }
    Int pooled() const { return size() / 4; }
    Strides zs() const { return {width * step, step}; }
    Strides ps() const { return {width / 2 * outputs, outputs}; }
};

// Parameters are of each block taps, bias, gamma and beta; of the last layer weights (class, position, channel), bias.
template <class R, int channels> struct Network {
    static constexpr Int lanes = Lanes<R>::count;
    const Sizes sizes;
    const R *const *params, *const *dot_params;
    R *const *found;
    const Few<R, channels> few{sizes.height, sizes.width, sizes.outputs, sizes.padding};
    const Int group = sizes.group, outputs = sizes.outputs, classes = sizes.classes;
    const Int pixels = few.height * few.width * channels;
    Int features, softmax, dlogits, record = 0;
    std::vector<Block<R>> blocks;
    R *records = nullptr; // of the group
    Buffer<R> image, first_z, v, shares;
    Matrices<R> work; // products before they are transformed back

    // Without parameters, it only knows the size of a record.
    Network(Sizes sizes, const R *const *params, const R *const *dot_params, R *const *found)
        : sizes(sizes), params(params), dot_params(dot_params), found(found) {
        Int height = few.tall, width = few.wide;
        for (Int l = 0; l < sizes.depth; l++, height /= 2, width /= 2) {
            blocks.push_back({height, width, outputs, l ? 1 : height * width, l ? outputs : lanes});
            Block<R> &block = blocks.back();
            if (l) block.z = place(block.size());
            block.p = place(block.pooled()), block.dp = place(block.pooled());
            block.mean = place(outputs), block.rstd = place(outputs);
            features = block.pooled();
            if (params) allocate(l);
        }
        softmax = place(classes), dlogits = place(classes);
        if (!params) return;
        image = Buffer<R>(group * few.bordered);
        std::fill_n(image.at(), group * few.bordered, (R)0);
        first_z = Buffer<R>(group * blocks[0].size()), v = Buffer<R>(blocks[0].height * blocks[0].width * lanes);
        if (sizes.depth > 1) work = Matrices<R>(blocks[1].conv.tiles(group), outputs);
        if (!dot_params) return;
        shares = Buffer<R>(few.all_shares);
        std::fill_n(shares.at(), few.all_shares, (R)0);
    }

    Int place(Int size) {
        record += (size + lanes - 1) / lanes * lanes;
        return record - (size + lanes - 1) / lanes * lanes;
    }

    void allocate(Int l) {
        Block<R> &block = blocks[l];
        const R *dot_taps = dot_params ? dot_params[4 * l] : nullptr;
        if (l) block.conv = Convolution<R>(block.height, block.width, outputs, group, params[4 * l], dot_taps);
        if (l || dot_params) block.dz = Buffer<R>(group * block.size());
        if (!dot_params) return;
        block.dot_z = Buffer<R>(group * block.size());
        block.dot_p = Buffer<R>(group * block.pooled()), block.dot_dp = Buffer<R>(group * block.pooled());
    }

    R *at(Int image, Int place) const { return records + image * record + place; }
    R *z(Int l, Int image) const { return l ? at(image, blocks[l].z) : first_z.at(image * blocks[0].size()); }

    template <class F> void each_vector(Int images, F done) const {
        for (Int b = 0; b < images; b++)
            for (Int c = 0; c < outputs; c += lanes) done(b, c);
    }

    template <bool add>
    void block_backward(Int l, Int b, Int c, const R *dp, R *dz, R *dgamma, R *dbeta) const {
        const Block<R> &block = blocks[l];
        norm_backward<add>(dp + c, block.ps(), z(l, b) + c * block.apart, dz, block.zs(), at(b, block.mean) + c,
                           at(b, block.rstd) + c, params[4 * l + 2] + c, params[4 * l + 3] + c, dgamma, dbeta,
                           block.height, block.width);
    }

    void block_twice(Int l, Int b, Int c, const R *v, R *dz) const {
        const Block<R> &block = blocks[l];
        const Int from = c * block.apart;
        norm_twice(v, dot_params[4 * l + 2] + c, dot_params[4 * l + 3] + c, at(b, block.dp) + c,
                   block.dot_p.at(b * block.pooled()) + c, block.ps(), z(l, b) + from,
                   block.dot_z.at(b * block.size()) + from, dz, block.zs(), at(b, block.mean) + c,
                   at(b, block.rstd) + c, params[4 * l + 2] + c, params[4 * l + 3] + c, found[4 * l + 2] + c,
                   block.height, block.width);
    }

    void first_convolution(Int images, const R *x) const {
        for (Int b = 0; b < images; b++) few.border(x + b * pixels, image.at(b * few.bordered));
        each_vector(images, [&](Int b, Int c) {
            few.convolve(image.at(b * few.bordered), params[0] + c, params[1] + c, z(0, b) + c * few.positions);
        });
    }

    void take_inputs(Int l, Int images) const {
        const Convolution<R> &conv = blocks[l].conv;
        for (Int b = 0; b < images; b++) conv.take_input(b, at(b, blocks[l - 1].p), conv.a);
    }

    void forward(Int images) const {
        for (Int l = 0; l < sizes.depth; l++) {
            const Block<R> &block = blocks[l];
            const Convolution<R> &conv = block.conv;
            if (l) {
                take_inputs(l, images);
                conv.multiply_tiles(images, {{conv.a, conv.weights.plain}}, work);
                for (Int b = 0; b < images; b++) conv.give_output(b, work, params[4 * l + 1], z(l, b));
            }
            each_vector(images, [&](Int b, Int c) {
                norm_forward(z(l, b) + c * block.apart, block.zs(), at(b, block.p) + c, block.ps(),
                             params[4 * l + 2] + c, params[4 * l + 3] + c, at(b, block.mean) + c,
                             at(b, block.rstd) + c, block.height, block.width, sizes.eps);
            });
        }
    }

    static R dot(const R *a, const R *b, Int size) {
        V<R> total = {};
        for (Int k = 0; k < size; k += lanes) total += load(a + k) * load(b + k);
        R sum = 0;
        for (Int k = 0; k < lanes; k++) sum += total[k];
        return sum;
    }

    static void add(R *to, R scale, const R *from, Int size) {
        for (Int k = 0; k < size; k += lanes) store(to + k, load(to + k) + scale * load(from + k));
    }

    void logits(Int b, R *to) const {
        const R *weights = params[4 * sizes.depth], *bias = params[4 * sizes.depth + 1];
        for (Int k = 0; k < classes; k++)
            to[k] = dot(at(b, blocks.back().p), weights + k * features, features) + bias[k];
    }

    // The gradient by the logits and by the last block's output, and if it is wanted, by the labels: their sum with the
    // labels is the loss.
    void loss(Int images, const R *labels, R *by_labels = nullptr) const {
        const R *weights = params[4 * sizes.depth];
        const Block<R> &last = blocks.back();
        for (Int b = 0; b < images; b++, labels += classes) {
            R *s = at(b, softmax), *d = at(b, dlogits), *dp = at(b, last.dp), largest = -INFINITY, sum = 0, total = 0;
            logits(b, s);
            for (Int k = 0; k < classes; k++) largest = std::max(largest, s[k]);
            for (Int k = 0; k < classes; k++) {
                if (by_labels) by_labels[k] = largest - s[k];
                s[k] = std::exp(s[k] - largest);
                sum += s[k], total += labels[k];
            }
            for (Int k = 0; by_labels && k < classes; k++)
                by_labels[k] = (R)sizes.scale * (by_labels[k] + std::log(sum));
            if (by_labels) by_labels += classes;
            std::fill_n(dp, features, (R)0);
            for (Int k = 0; k < classes; k++) {
                s[k] /= sum;
                d[k] = (R)sizes.scale * (total * s[k] - labels[k]);
                add(dp, d[k], weights + k * features, features);
            }
        }
    }

    // All but the first block's.
    void backward(Int images) const {
        for (Int l = sizes.depth - 1; l > 0; l--) {
            const Convolution<R> &conv = blocks[l].conv;
            take_gradients(l, images, true);
            conv.add_weights(images, {{conv.a, conv.dz}});
            give_gradients(l, images);
        }
    }

    // dz, and what it adds to the parameters' gradients if these are wanted.
    void take_gradients(Int l, Int images, bool wanted) const {
        const Block<R> &block = blocks[l];
        R none[2 * lanes] = {};
        for (Int b = 0; b < images; b++) {
            R *dz = block.dz.at(b * block.size());
            for (Int c = 0; c < outputs; c += lanes)
                block_backward<false>(l, b, c, at(b, block.dp), dz + c, wanted ? found[4 * l + 2] + c : none,
                                      wanted ? found[4 * l + 3] + c : none);
            block.conv.take_output(b, dz, block.conv.dz);
            if (wanted) add_bias(l, dz);
        }
    }

    void give_gradients(Int l, Int images) const {
        const Convolution<R> &conv = blocks[l].conv;
        conv.multiply_tiles(images, {{conv.dz, conv.weights.turned}}, work);
        for (Int b = 0; b < images; b++) conv.give_input(b, work, at(b, blocks[l - 1].dp));
    }

    void add_bias(Int l, const R *dz) const {
        R *to = found[4 * l + 1];
        for (Int c = 0; c < outputs; c += lanes) {
            V<R> sum = {};
            for (Int k = 0; k < blocks[l].height * blocks[l].width; k++) sum += load(dz + k * outputs + c);
            store(to + c, load(to + c) + sum);
        }
    }

    void gradient(Int images, const R *x, const R *labels, R *by_labels) const {
        first_convolution(images, x);
        forward(images);
        loss(images, labels, by_labels);
        R *weights = found[4 * sizes.depth], *bias = found[4 * sizes.depth + 1];
        for (Int b = 0; b < images; b++)
            for (Int k = 0; k < classes; k++) {
                add(weights + k * features, at(b, dlogits)[k], at(b, blocks.back().p), features);
                bias[k] += at(b, dlogits)[k];
            }
        backward(images);
        each_vector(images, [&](Int b, Int c) {
            block_backward<false>(0, b, c, at(b, blocks[0].dp), v.at(), found[2] + c, found[3] + c);
            few.by_weights(v.at(), image.at(b * few.bordered), found[0] + c, found[1] + c);
        });
    }

    // What the gradient computed, and without a record of it, this, too.
    void again(Int images, const R *x, const R *labels, bool recorded) const {
        first_convolution(images, x);
        if (!recorded) {
            forward(images);
            loss(images, labels);
        }
        for (Int l = sizes.depth - 1; l > 0; l--) {
            if (recorded) take_inputs(l, images);
            take_gradients(l, images, false);
            if (!recorded) give_gradients(l, images);
        }
    }

    void dot_forward(Int images) const {
        each_vector(images, [&](Int b, Int c) {
            few.convolve(image.at(b * few.bordered), dot_params[0] + c, dot_params[1] + c, v.at());
            block_twice(0, b, c, v.at(), blocks[0].dz.at(b * blocks[0].size() + c * few.positions));
        });
        for (Int l = 1; l < sizes.depth; l++) {
            const Block<R> &block = blocks[l];
            const Convolution<R> &conv = block.conv;
            for (Int b = 0; b < images; b++) conv.take_input(b, blocks[l - 1].dot_p.at(b * block.size()), conv.dot_a);
            conv.multiply_tiles(images, {{conv.a, conv.dot_weights.plain}, {conv.dot_a, conv.weights.plain}}, work);
            for (Int b = 0; b < images; b++) {
                R *dot_z = block.dz.at(b * block.size()); // dz is in conv
                conv.give_output(b, work, dot_params[4 * l + 1], dot_z);
                for (Int c = 0; c < outputs; c += lanes) block_twice(l, b, c, dot_z + c, nullptr);
            }
        }
    }

    void dot_loss(Int images, const R *labels, R *by_labels) const {
        const R *weights = params[4 * sizes.depth], *dot_weights = dot_params[4 * sizes.depth];
        const R *dot_bias = dot_params[4 * sizes.depth + 1], scale = sizes.scale;
        R *dw = found[4 * sizes.depth], *db = found[4 * sizes.depth + 1];
        const Block<R> &last = blocks.back();
        std::vector<R> t(classes);
        for (Int b = 0; b < images; b++, labels += classes, by_labels += classes) {
            const R *a = at(b, last.p), *dot_a = last.dot_p.at(b * features), *s = at(b, softmax), *d = at(b, dlogits);
            R *to = last.dot_dp.at(b * features), mean = 0, total = 0;
            for (Int k = 0; k < classes; k++) {
                const Int row = k * features;
                t[k] = dot(a, dot_weights + row, features) + dot(dot_a, weights + row, features) + dot_bias[k];
                mean += s[k] * t[k], total += labels[k];
            }
            std::fill_n(to, features, (R)0);
            for (Int k = 0; k < classes; k++) {
                const Int row = k * features;
                const R dot_d = scale * total * s[k] * (t[k] - mean);
                by_labels[k] = scale * (mean - t[k]);
                add(to, dot_d, weights + row, features), add(to, d[k], dot_weights + row, features);
                add(dw + row, dot_d, a, features), add(dw + row, d[k], dot_a, features);
                db[k] += dot_d;
            }
        }
    }

    void dot_backward(Int images) const {
        for (Int l = sizes.depth - 1; l > 0; l--) {
            const Block<R> &block = blocks[l];
            const Convolution<R> &conv = block.conv;
            for (Int b = 0; b < images; b++) {
                R *dot_dz = block.dot_z.at(b * block.size());
                for (Int c = 0; c < outputs; c += lanes)
                    block_backward<true>(l, b, c, block.dot_dp.at(b * block.pooled()), dot_dz + c,
                                         found[4 * l + 2] + c, found[4 * l + 3] + c);
                conv.take_output(b, dot_dz, conv.dot_dz);
                add_bias(l, dot_dz);
            }
            conv.add_weights(images, {{conv.a, conv.dot_dz}, {conv.dot_a, conv.dz}});
            conv.multiply_tiles(images, {{conv.dot_dz, conv.weights.turned}, {conv.dz, conv.dot_weights.turned}}, work);
            for (Int b = 0; b < images; b++) conv.give_input(b, work, blocks[l - 1].dot_dp.at(b * block.size()));
        }
    }

    void dot_first(Int images, const std::vector<R> &rows, const std::vector<R> &dot_rows, R *by_x) const {
        const Block<R> &block = blocks[0];
        for (Int b = 0; b < images; b++) {
            R *dot_dz = block.dot_z.at(b * block.size());
            for (Int c = 0; c < outputs; c += lanes) {
                R *some = dot_dz + c * few.positions;
                block_backward<true>(0, b, c, block.dot_dp.at(b * block.pooled()), some, found[2] + c, found[3] + c);
                few.by_weights(some, image.at(b * few.bordered), found[0] + c, found[1] + c);
            }
            few.spread(dot_dz, rows.data(), block.dz.at(b * block.size()), dot_rows.data(), shares.at());
            few.gather(shares.at(), by_x + b * pixels);
        }
    }

    void evaluate(const R *x, R *to) {
        const Buffer<R> own(group * record);
        records = own.at();
        for (Int from = 0; from < sizes.images; from += group) {
            const Int images = std::min(group, sizes.images - from);
            first_convolution(images, x + from * pixels);
            forward(images);
            for (Int b = 0; b < images; b++) logits(b, to + (from + b) * classes);
        }
    }

    // `kept` has room for all records, or is none. With dot_params, records that are kept are those of the gradient.
    void run(const R *x, const R *labels, R *kept, R *by_x, R *by_labels) {
        const Buffer<R> own(kept ? 0 : group * record);
        std::vector<R> rows, dot_rows;
        if (dot_params) rows = few.rows(params[0]), dot_rows = few.rows(dot_params[0]);
        for (Int b = 0; b < sizes.images; b += group, x += group * pixels, labels += group * classes) {
            const Int images = std::min(group, sizes.images - b);
            records = kept ? kept + b * record : own.at();
            if (!dot_params) {
                gradient(images, x, labels, by_labels + b * classes);
                continue;
            }
            again(images, x, labels, kept);
            dot_forward(images);
            dot_loss(images, labels, by_labels + b * classes);
            dot_backward(images);
            dot_first(images, rows, dot_rows, by_x + b * pixels);
        }
        for (Int l = 1; l < sizes.depth; l++) blocks[l].conv.give_weights(found[4 * l]);
    }
};

} // namespace

#define EXPORT(R)                                                                                                      \
    extern "C" void network_logits_##R(const R *x, const R *const *params, R *logits, Int images, Int height,          \
                                       Int width, Int channels, Int padding, Int depth, Int outputs, Int classes,      \
                                       Int group, double eps) {                                                        \
        const Sizes sizes = {images, height, width, padding, depth, outputs, classes, group, 0, eps};                  \
        if (channels == 1) Network<R, 1>(sizes, params, nullptr, nullptr).evaluate(x, logits);                         \
        if (channels == 3) Network<R, 3>(sizes, params, nullptr, nullptr).evaluate(x, logits);                         \
    }                                                                                                                  \
    extern "C" Int network_record_##R(Int height, Int width, Int channels, Int padding, Int depth, Int outputs,        \
                                      Int classes) {                                                                   \
        const Sizes sizes = {0, height, width, padding, depth, outputs, classes, 0, 0, 0};                             \
        return channels == 1 ? Network<R, 1>(sizes, nullptr, nullptr, nullptr).record                                  \
                             : Network<R, 3>(sizes, nullptr, nullptr, nullptr).record;                                 \
    }                                                                                                                  \
    extern "C" void network_##R(const R *x, const R *labels, const R *const *params, const R *const *dot_params,       \
                                R *const *found, R *kept, R *by_x, R *by_labels, Int images, Int height, Int width,    \
                                Int channels, Int padding, Int depth, Int outputs, Int classes, Int group,             \
                                double scale, double eps) {                                                            \
        const Sizes sizes = {images, height, width, padding, depth, outputs, classes, group, scale, eps};              \
        if (channels == 1) Network<R, 1>(sizes, params, dot_params, found).run(x, labels, kept, by_x, by_labels);      \
        if (channels == 3) Network<R, 3>(sizes, params, dot_params, found).run(x, labels, kept, by_x, by_labels);      \
    }
EXPORT(float)
EXPORT(double)
