// 3x3 convolutions of stride 1 with a padding of 1, on images that lie channels last and have even sides, by Winograd's
// minimal filtering F(2x2, 3x3) (Lavin and Gray, 2016): a tile of 2x2 outputs takes 16 products instead of 36.
//
// With a tile's inputs d (4x4), taps g (3x3) and outputs y (2x2), for each input and output channel:
//     V = B' d B      U = G g G'      M = sum over input channels of U * V, element by element      y = A' M A
//     B' = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1]      G = [1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1]
//     A' = [1 1 1 0; 0 1 -1 -1]
// By the taps: dM = A dy A'      dU = sum over tiles of V * dM      dg = G' dU G
// By the images it is the same convolution of dy with the taps turned around and channels exchanged.
//
// The 16 elements of V, U and M lie in planes of their own, so that each is a matrix product over channels, or over tiles.

#include "blocks.h"

namespace {

constexpr Int ROWS = VECTOR_BYTES == 64 ? 12 : 4; // of a tile: with its vectors they fill the registers
constexpr Int WIDE = VECTOR_BYTES == 64 ? 2 : 1;
constexpr Int TILES = 36; // at a time: what they take stays in the cache

// A matrix by the distance to the next row and to the next column.
template <class R> struct Matrix {
    R *at;
    Int row, column;

    Matrix from(Int i, Int j) const { return {at + i * row + j * column, row, column}; }
};

// c = a b, or c += a b, for M rows and N vectors of columns; b and c lie row by row.
template <class R, Int M, Int N, bool ADD>
inline void product_tile(Matrix<const R> a, Matrix<const R> b, Matrix<R> c, Int depth) {
    constexpr Int L = Lanes<R>::count;
    V<R> sums[M][N];
#pragma GCC unroll 12
    for (Int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (Int n = 0; n < N; n++) sums[m][n] = ADD ? load(c.at + m * c.row + n * L) : V<R>{};
    for (Int k = 0; k < depth; k++) {
        V<R> row[N];
#pragma GCC unroll 2
        for (Int n = 0; n < N; n++) row[n] = load(b.at + k * b.row + n * L);
#pragma GCC unroll 12
        for (Int m = 0; m < M; m++) {
            const R factor = a.at[m * a.row + k * a.column];
#pragma GCC unroll 2
            for (Int n = 0; n < N; n++) sums[m][n] += factor * row[n];
        }
    }
#pragma GCC unroll 12
    for (Int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (Int n = 0; n < N; n++) store(c.at + m * c.row + n * L, sums[m][n]);
}

template <class R, Int N, bool ADD>
void product_columns(Matrix<const R> a, Matrix<const R> b, Matrix<R> c, Int rows, Int depth) {
    Int m = 0;
    for (; m + ROWS <= rows; m += ROWS) product_tile<R, ROWS, N, ADD>(a.from(m, 0), b, c.from(m, 0), depth);
    if (ROWS > 4)
        for (; m + 4 <= rows; m += 4) product_tile<R, 4, N, ADD>(a.from(m, 0), b, c.from(m, 0), depth);
    for (; m < rows; m++) product_tile<R, 1, N, ADD>(a.from(m, 0), b, c.from(m, 0), depth);
}

template <class R, bool ADD>
void product(Matrix<const R> a, Matrix<const R> b, Matrix<R> c, Int rows, Int columns, Int depth) {
    constexpr Int L = Lanes<R>::count;
    Int n = 0;
    for (; n + WIDE * L <= columns; n += WIDE * L)
        product_columns<R, WIDE, ADD>(a, b.from(0, n), c.from(0, n), rows, depth);
    if (n < columns) product_columns<R, 1, ADD>(a, b.from(0, n), c.from(0, n), rows, depth);
}

// U = G g G', of [3][3][channels] numbers in [4][4][channels].
template <class R> void transform_taps(const R *taps, R *u, Int channels) {
    const auto spread = [](V<R> a, V<R> b, V<R> c, V<R> *to, Int step) {
        const V<R> ends = (a + c) * (R)0.5, middle = b * (R)0.5;
        to[0] = a, to[step] = ends + middle, to[2 * step] = ends - middle, to[3 * step] = c;
    };
    for (Int c = 0; c < channels; c += Lanes<R>::count) {
        V<R> half[4][3], whole[4];
        for (Int j = 0; j < 3; j++) {
            const R *at = taps + j * channels + c;
            spread(load(at), load(at + 3 * channels), load(at + 6 * channels), &half[0][j], 3);
        }
        for (Int i = 0; i < 4; i++) {
            spread(half[i][0], half[i][1], half[i][2], whole, 1);
            for (Int j = 0; j < 4; j++) store(u + (4 * i + j) * channels + c, whole[j]);
        }
    }
}

// dg = G' dU G, the adjoint of that.
template <class R> void gather_taps(const R *u, R *taps, Int channels) {
    const auto gather = [](V<R> a, V<R> b, V<R> c, V<R> d, V<R> *to, Int step) {
        const V<R> middle = (b + c) * (R)0.5;
        to[0] = a + middle, to[step] = (b - c) * (R)0.5, to[2 * step] = middle + d;
    };
    for (Int c = 0; c < channels; c += Lanes<R>::count) {
        V<R> half[3][4], whole[3];
        for (Int j = 0; j < 4; j++) {
            const R *at = u + j * channels + c;
            gather(load(at), load(at + 4 * channels), load(at + 8 * channels), load(at + 12 * channels), &half[0][j], 4);
        }
        for (Int i = 0; i < 3; i++) {
            gather(half[i][0], half[i][1], half[i][2], half[i][3], whole, 1);
            for (Int j = 0; j < 3; j++) store(taps + (3 * i + j) * channels + c, whole[j]);
        }
    }
}

// Some of the tiles of a batch, and where they are in the images.
struct Tiles {
    Int height, width, first, count;

    // How far it is from one of the 16 planes to the next: not a power of two, for the cache's sake.
    template <class R> Int plane(Int channels) const { return count * channels + Lanes<R>::count; }

    template <class F> void each(F done) const {
        const Int across = width / 2, whole = height / 2 * across;
        for (Int t = 0; t < count; t++) {
            const Int image = (first + t) / whole, rest = (first + t) % whole;
            done(t, image, rest / across * 2, rest % across * 2);
        }
    }
};

// V = B' d B.
template <class R> void transform_inputs(const R *x, const R *zeros, R *v, const Tiles &tiles, Int channels) {
    const Int plane = tiles.plane<R>(channels);
    tiles.each([&](Int t, Int image, Int top, Int left) {
        const R *from[4][4];
        for (Int k = 0; k < 16; k++) {
            const Int i = top - 1 + k / 4, j = left - 1 + k % 4;
            const bool inside = i >= 0 && i < tiles.height && j >= 0 && j < tiles.width;
            from[k / 4][k % 4] = inside ? x + ((image * tiles.height + i) * tiles.width + j) * channels : zeros;
        }
        for (Int c = 0; c < channels; c += Lanes<R>::count) {
            V<R> half[4][4];
            for (Int j = 0; j < 4; j++) {
                const V<R> a = load(from[0][j] + c), b = load(from[1][j] + c);
                const V<R> d = load(from[2][j] + c), e = load(from[3][j] + c);
                half[0][j] = a - d, half[1][j] = b + d, half[2][j] = d - b, half[3][j] = b - e;
            }
            R *to = v + t * channels + c;
            for (Int i = 0; i < 4; i++, to += 4 * plane) {
                store(to, half[i][0] - half[i][2]);
                store(to + plane, half[i][1] + half[i][2]);
                store(to + 2 * plane, half[i][2] - half[i][1]);
                store(to + 3 * plane, half[i][1] - half[i][3]);
            }
        }
    });
}

// y = A' M A + bias.
template <class R> void gather_outputs(const R *m, const R *bias, R *y, const Tiles &tiles, Int channels) {
    const Int plane = tiles.plane<R>(channels), row = tiles.width * channels;
    tiles.each([&](Int t, Int image, Int top, Int left) {
        R *to = y + ((image * tiles.height + top) * tiles.width + left) * channels;
        for (Int c = 0; c < channels; c += Lanes<R>::count) {
            V<R> half[2][4];
            for (Int j = 0; j < 4; j++) {
                const R *from = m + t * channels + c + j * plane;
                const V<R> b = load(from + 4 * plane), d = load(from + 8 * plane);
                half[0][j] = load(from) + b + d, half[1][j] = b - d - load(from + 12 * plane);
            }
            const V<R> level = bias ? load(bias + c) : V<R>{};
            for (Int i = 0; i < 2; i++) {
                store(to + i * row + c, half[i][0] + half[i][1] + half[i][2] + level);
                store(to + i * row + channels + c, half[i][1] - half[i][2] - half[i][3] + level);
            }
        }
    });
}

// dM = A dy A', the adjoint of that; dy is added up, too, if `sums` are wanted.
template <class R> void transform_outputs(const R *dy, R *m, R *sums, const Tiles &tiles, Int channels) {
    const Int plane = tiles.plane<R>(channels), row = tiles.width * channels;
    tiles.each([&](Int t, Int image, Int top, Int left) {
        const R *from = dy + ((image * tiles.height + top) * tiles.width + left) * channels;
        for (Int c = 0; c < channels; c += Lanes<R>::count) {
            V<R> half[4][2];
            for (Int j = 0; j < 2; j++) {
                const V<R> a = load(from + j * channels + c), b = load(from + row + j * channels + c);
                half[0][j] = a, half[1][j] = a + b, half[2][j] = a - b, half[3][j] = -b;
            }
            if (sums) store(sums + c, load(sums + c) + (half[1][0] + half[1][1]));
            R *to = m + t * channels + c;
            for (Int i = 0; i < 4; i++, to += 4 * plane) {
                store(to, half[i][0]);
                store(to + plane, half[i][0] + half[i][1]);
                store(to + 2 * plane, half[i][0] - half[i][1]);
                store(to + 3 * plane, -half[i][1]);
            }
        }
    });
}

// What a thread keeps from call to call, so that it is allocated once.
template <class R> struct Scratch {
    std::vector<R> u, v, m, zeros;

    Scratch &fit(Int in, Int out) {
        const Int more = Lanes<R>::count;
        grow(u, 16 * in * out), grow(v, 16 * (TILES * in + more)), grow(m, 16 * (TILES * out + more)), grow(zeros, in);
        return *this;
    }
    static void grow(std::vector<R> &part, Int size) {
        if ((Int)part.size() < size) part.resize(size);
    }
    static Scratch &mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

struct Shape {
    Int images, height, width, in, out;

    template <class F> void each_tiles(F done) const {
        const Int tiles = images * (height / 2) * (width / 2);
        for (Int first = 0; first < tiles; first += TILES)
            done(Tiles{height, width, first, std::min(TILES, tiles - first)});
    }
};

template <class R> void forward(const R *x, const R *taps, const R *bias, R *y, const Shape &shape) {
    auto &[u, v, m, zeros] = Scratch<R>::mine().fit(shape.in, shape.out);
    const Int in = shape.in, out = shape.out;
    transform_taps(taps, u.data(), in * out);
    shape.each_tiles([&, &u = u, &v = v, &m = m, &zeros = zeros](const Tiles &tiles) {
        transform_inputs(x, zeros.data(), v.data(), tiles, in);
        for (Int p = 0; p < 16; p++) {
            const Matrix<const R> a = {v.data() + p * tiles.plane<R>(in), in, 1}, b = {u.data() + p * in * out, out, 1};
            product<R, false>(a, b, {m.data() + p * tiles.plane<R>(out), out, 1}, tiles.count, out, in);
        }
        gather_outputs(m.data(), bias, y, tiles, out);
    });
}

template <class R> void by_taps(const R *dy, const R *x, R *dtaps, R *sums, const Shape &shape) {
    auto &[u, v, m, zeros] = Scratch<R>::mine().fit(shape.in, shape.out);
    const Int in = shape.in, out = shape.out;
    std::fill_n(u.data(), 16 * in * out, (R)0);
    shape.each_tiles([&, &u = u, &v = v, &m = m, &zeros = zeros](const Tiles &tiles) {
        transform_inputs(x, zeros.data(), v.data(), tiles, in);
        transform_outputs(dy, m.data(), sums, tiles, out);
        for (Int p = 0; p < 16; p++) {
            const Matrix<const R> a = {v.data() + p * tiles.plane<R>(in), 1, in};
            const Matrix<const R> b = {m.data() + p * tiles.plane<R>(out), out, 1};
            product<R, true>(a, b, {u.data() + p * in * out, out, 1}, in, out, tiles.count);
        }
    });
    gather_taps(u.data(), dtaps, in * out);
}

} // namespace

#define EXPORT(R)                                                                                                      \
    extern "C" void winograd_forward_##R(const R *x, const R *taps, const R *bias, R *y, Int images, Int height,       \
                                         Int width, Int in, Int out) {                                                 \
        forward<R>(x, taps, bias, y, {images, height, width, in, out});                                                \
    }                                                                                                                  \
    extern "C" void winograd_by_taps_##R(const R *dy, const R *x, R *dtaps, R *sums, Int images, Int height,           \
                                         Int width, Int in, Int out) {                                                 \
        by_taps<R>(dy, x, dtaps, sums, {images, height, width, in, out});                                              \
    }
EXPORT(float)
EXPORT(double)
