// Training a fully connected ReLU network with Adam, an epoch in one call: at this size, starting twenty operations a step
// takes as long as the arithmetic.
//
// Weights are (input, output). Every hidden layer's width is a multiple of a vector's lanes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

typedef std::int64_t Int;

namespace {

constexpr Int LANES = 16, ROWS = 8;
typedef float V __attribute__((vector_size(64), aligned(4), may_alias));

inline V load(const float *at) { return *(const V *)at; }
inline void store(float *at, V value) { *(V *)at = value; }

// `rows` rows and `vectors` vectors of columns of out = bias + a b, where a is row-major or, `transposed`, column-major.
template <bool transposed, Int rows, Int vectors>
void tile(const float *a, Int stride, const float *b, Int width, Int depth, const float *bias, float *out) {
    V total[rows][vectors];
    for (Int r = 0; r < rows; r++)
        for (Int v = 0; v < vectors; v++) total[r][v] = bias ? load(bias + v * LANES) : V{};
    for (Int k = 0; k < depth; k++, b += width, a += transposed ? stride : 1) {
        V by[vectors];
        for (Int v = 0; v < vectors; v++) by[v] = load(b + v * LANES);
        for (Int r = 0; r < rows; r++)
            for (Int v = 0; v < vectors; v++) total[r][v] += a[transposed ? r : r * stride] * by[v];
    }
    for (Int r = 0; r < rows; r++)
        for (Int v = 0; v < vectors; v++) store(out + r * width + v * LANES, total[r][v]);
}

template <bool transposed, Int vectors>
void strip(const float *a, Int stride, const float *b, Int rows, Int depth, Int width, const float *bias, float *out) {
    const Int next = transposed ? 1 : stride;
    Int r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        tile<transposed, ROWS, vectors>(a + r * next, stride, b, width, depth, bias, out + r * width);
    for (; r < rows; r++) tile<transposed, 1, vectors>(a + r * next, stride, b, width, depth, bias, out + r * width);
}

// out (rows x width) = bias + a (rows x depth) b (depth x width); `transposed`, a is (depth x stride).
template <bool transposed>
void product(const float *a, const float *b, Int rows, Int depth, Int width, const float *bias, float *out,
             Int stride = 0) {
    if (!transposed) stride = depth;
    Int c = 0;
    for (; c + 2 * LANES <= width; c += 2 * LANES)
        strip<transposed, 2>(a, stride, b + c, rows, depth, width, bias ? bias + c : nullptr, out + c);
    for (; c < width; c += LANES)
        strip<transposed, 1>(a, stride, b + c, rows, depth, width, bias ? bias + c : nullptr, out + c);
}

// Adam with decay as part of the gradient, or decoupled from it.
struct Adam {
    double rate, beta1, beta2, eps, decay;
    bool decoupled;
    Int step = 0;
    float size, scale; // of this step

    void next() {
        step++;
        size = rate / (1 - std::pow(beta1, step));
        scale = 1 / std::sqrt(1 - std::pow(beta2, step));
    }

    void apply(float *p, float *m, float *v, const float *g, Int count) const {
        const float b1 = 1 - beta1, b2 = beta2, rest = 1 - beta2, tiny = eps;
        const float shrink = decoupled ? 1 - rate * decay : 1, pull = decoupled ? 0 : decay;
        for (Int i = 0; i < count; i++) {
            const float grad = g[i] + pull * p[i];
            m[i] += (grad - m[i]) * b1;
            v[i] = v[i] * b2 + rest * grad * grad;
            p[i] = p[i] * shrink - size * m[i] / (std::sqrt(v[i]) * scale + tiny);
        }
    }
};

struct Layer {
    Int in, out, padded; // the last layer's outputs, the classes, are filled up to whole vectors
    float *weight, *weight_m, *weight_v, *bias, *bias_m, *bias_v;
    std::vector<float> filled, filled_bias, result, delta, transposed, grad, bias_grad;

    void forward(const float *x, Int batch, bool last) {
        const float *w = weight, *b = bias;
        result.resize(batch * padded);
        delta.resize(batch * padded);
        if (padded != out) {
            filled.assign(in * padded, 0);
            filled_bias.assign(padded, 0);
            for (Int i = 0; i < in; i++) std::copy_n(weight + i * out, out, &filled[i * padded]);
            std::copy_n(bias, out, &filled_bias[0]);
            w = &filled[0], b = &filled_bias[0];
        }
        product<false>(x, w, batch, in, padded, b, &result[0]);
        if (!last)
            for (float &value : result) value = value > 0 ? value : 0;
    }

    // The gradient by the input, where that input was positive.
    void backward(const float *x, Int batch, float *dx) {
        const float *w = padded == out ? weight : &filled[0];
        transposed.resize(in * padded);
        for (Int start = 0; start < in; start += LANES) // in blocks, for the cache
            for (Int o = 0; o < padded; o++)
                for (Int i = start; i < start + LANES; i++) transposed[o * in + i] = w[i * padded + o];
        product<false>(&delta[0], &transposed[0], batch, padded, in, nullptr, dx);
        for (Int i = 0; i < batch * in; i++) dx[i] = x[i] > 0 ? dx[i] : 0;
    }

    // A few rows' gradients at a time: they are used up while they are in the cache.
    void learn(const float *x, Int batch, const Adam &adam) {
        grad.resize(ROWS * padded);
        for (Int r = 0; r < in; r += ROWS) {
            const Int rows = std::min(ROWS, in - r), at = r * out;
            product<true>(x + r, &delta[0], rows, batch, padded, nullptr, &grad[0], in);
            if (padded != out)
                for (Int i = 1; i < rows; i++) std::copy_n(&grad[i * padded], out, &grad[i * out]);
            adam.apply(weight + at, weight_m + at, weight_v + at, &grad[0], rows * out);
        }
        bias_grad.assign(out, 0);
        for (Int s = 0; s < batch; s++)
            for (Int o = 0; o < out; o++) bias_grad[o] += delta[s * padded + o];
        adam.apply(bias, bias_m, bias_v, &bias_grad[0], out);
    }
};

// The mean cross-entropy of logits, and its gradient in their place.
float cross_entropy(Layer &last, const Int *y, Int batch) {
    float loss = 0;
    for (Int s = 0; s < batch; s++) {
        const float *logits = &last.result[s * last.padded];
        float *delta = &last.delta[s * last.padded];
        const float top = *std::max_element(logits, logits + last.out);
        float sum = 0;
        for (Int c = 0; c < last.out; c++) sum += delta[c] = std::exp(logits[c] - top);
        loss += std::log(sum) + top - logits[y[s]];
        for (Int c = 0; c < last.out; c++) delta[c] = (delta[c] / sum - (c == y[s])) / batch;
        std::fill(delta + last.out, delta + last.padded, 0.f);
    }
    return loss / batch;
}

} // namespace

// `tensors` has six a layer: weight, its moments, bias, its moments.
extern "C" void mlp_train(const float *x, const Int *y, const Int *order, Int count, Int batch, Int layers,
                          const Int *sizes, float *const *tensors, Int done, double rate, double beta1, double beta2,
                          double eps, double decay, Int decoupled, float *losses) {
    std::vector<Layer> net(layers);
    for (Int l = 0; l < layers; l++) {
        Layer &layer = net[l];
        layer.in = sizes[l], layer.out = sizes[l + 1], layer.padded = (layer.out + LANES - 1) / LANES * LANES;
        float *const *own = tensors + 6 * l;
        layer.weight = own[0], layer.weight_m = own[1], layer.weight_v = own[2];
        layer.bias = own[3], layer.bias_m = own[4], layer.bias_v = own[5];
    }
    batch = std::min(batch, count);
    Adam adam{rate, beta1, beta2, eps, decay, decoupled != 0, done};
    std::vector<float> samples(batch * sizes[0]);
    std::vector<Int> labels(batch);
    for (Int at = 0; at < count; at += batch, order += batch) {
        const Int size = std::min(batch, count - at);
        for (Int s = 0; s < size; s++) {
            std::copy_n(x + order[s] * sizes[0], sizes[0], &samples[s * sizes[0]]);
            labels[s] = y[order[s]];
        }
        auto input = [&](Int l) { return l ? &net[l - 1].result[0] : &samples[0]; };
        for (Int l = 0; l < layers; l++) net[l].forward(input(l), size, l == layers - 1);
        *losses++ = cross_entropy(net[layers - 1], &labels[0], size);
        adam.next();
        for (Int l = layers - 1; l >= 0; l--) {
            if (l) net[l].backward(input(l), size, &net[l - 1].delta[0]);
            net[l].learn(input(l), size, adam);
        }
    }
}
