// Training a fully connected network, an epoch in one call: at this size, starting twenty operations a step takes as long
// as the arithmetic.
//
// Weights are (input, output). Layers whose outputs don't come in whole vectors are filled up with zeros, which stay zero:
// every activation leaves them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "vectors.h"

typedef std::int64_t Int;

namespace {

constexpr Int LANES = 16, ROWS = VECTOR_BYTES == 64 ? 8 : 4, WIDE = VECTOR_BYTES == 64 ? 2 : 1; // of a tile
typedef Vector<float, LANES>::type V;

inline V load(const float *at) { return Vector<float, LANES>::load(at); }
inline void store(float *at, const V &value) { Vector<float, LANES>::store(at, value); }

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

inline Int whole_vectors(Int count) { return (count + LANES - 1) / LANES * LANES; }

// out (rows x width) = bias + a (rows x depth) b (depth x width), where a's rows are `stride` apart, or depth if it is 0;
// `transposed`, a is (depth x stride).
template <bool transposed>
void product(const float *a, const float *b, Int rows, Int depth, Int width, const float *bias, float *out,
             Int stride = 0) {
    if (!stride) stride = depth;
    Int c = 0;
    for (; c + WIDE * LANES <= width; c += WIDE * LANES)
        strip<transposed, WIDE>(a, stride, b + c, rows, depth, width, bias ? bias + c : nullptr, out + c);
    for (; c < width; c += LANES)
        strip<transposed, 1>(a, stride, b + c, rows, depth, width, bias ? bias + c : nullptr, out + c);
}

// What is added to a gradient: scale * (p - reference) + shift. What isn't there is null.
struct Affine {
    double scale;
    float *const *reference, *const *shift; // for each weight and bias
};

enum Kind : Int { SUM, SGD, MOMENTUM, ADAM, ADAMW };

// The optimizer, with decay as part of the gradient or, in AdamW, decoupled from it. SUM is none: it adds up `rate` times
// the gradient in `m`.
struct Optimizer {
    Kind kind;
    double rate, beta1, beta2, eps, decay; // beta1 is momentum's, too
    Int step;
    Affine affine;
    float size = 0, scale = 0; // of this step

    void next() {
        step++;
        size = rate / (1 - std::pow(beta1, step));
        scale = 1 / std::sqrt(1 - std::pow(beta2, step));
    }

    // The compiler must know that nothing overlaps: else it checks each pair at run time, or gives up.
    template <bool pulled, bool shifted>
    void update(float *__restrict p, float *__restrict m, float *__restrict v, const float *__restrict g,
                const float *__restrict reference, const float *__restrict shift, Int count) const {
        const float a = affine.scale;
        const bool decoupled = kind == ADAMW;
        const float b1 = 1 - beta1, b2 = beta2, rest = 1 - beta2, tiny = eps, by = rate, keep = beta1;
        const float shrink = decoupled ? 1 - rate * decay : 1, pull = decoupled ? 0 : decay;
        auto corrected = [=](float grad, float at, float from, float by) {
            if (pulled) grad += a * (at - from);
            if (shifted) grad += by;
            return grad + pull * at;
        };
        if (kind == ADAM || kind == ADAMW)
            for (Int i = 0; i < count; i++) {
                const float grad = corrected(g[i], p[i], pulled ? reference[i] : 0, shifted ? shift[i] : 0);
                m[i] += (grad - m[i]) * b1;
                v[i] = v[i] * b2 + rest * grad * grad;
                p[i] = p[i] * shrink - size * m[i] / (std::sqrt(v[i]) * scale + tiny);
            }
        else if (kind == MOMENTUM)
            for (Int i = 0; i < count; i++) {
                m[i] = keep * m[i] + corrected(g[i], p[i], pulled ? reference[i] : 0, shifted ? shift[i] : 0);
                p[i] -= by * m[i];
            }
        else if (kind == SGD)
            for (Int i = 0; i < count; i++)
                p[i] -= by * corrected(g[i], p[i], pulled ? reference[i] : 0, shifted ? shift[i] : 0);
        else
            for (Int i = 0; i < count; i++) m[i] += by * g[i];
    }

    // A part, from `at` on, of the tensor with this number.
    void apply(Int tensor, Int at, float *p, float *m, float *v, const float *g, Int count) const {
        const float *reference = affine.reference[tensor], *shift = affine.shift[tensor];
        p += at, m += at, v += at;
        if (reference) reference += at;
        if (shift) shift += at;
        if (reference && shift)
            update<true, true>(p, m, v, g, reference, shift, count);
        else if (reference)
            update<true, false>(p, m, v, g, reference, shift, count);
        else if (shift)
            update<false, true>(p, m, v, g, reference, shift, count);
        else
            update<false, false>(p, m, v, g, reference, shift, count);
    }
};

// A layer's rows are those of a batch's samples, and behind them others that some losses need: derivatives of the
// samples' rows in a direction, or samples that only the last layer sees.
struct Layer {
    Int number, in, out, stride, padded; // rows of the input are `stride` apart, those of the result `padded`
    Activation activation;
    float *weight, *weight_m, *weight_v, *bias, *bias_m, *bias_v;
    std::vector<float> result, delta, slopes, bends, transposed, grad, bias_grad;
    std::vector<std::vector<float>> filled = {};

    // A tensor whose rows are as wide as the layer's result, in the place of one whose rows are `out` wide.
    float *fill(const float *from, Int rows) {
        filled.emplace_back(rows * padded);
        for (Int i = 0; i < rows; i++) std::copy_n(from + i * out, out, &filled.back()[i * padded]);
        return &filled.back()[0];
    }

    // The layer's own six, weight, bias and their moments; where there are no moments, the same tensor stands in for them.
    void own(float *const *tensors) {
        weight = tensors[0], weight_m = tensors[1], weight_v = tensors[2];
        bias = tensors[3], bias_m = tensors[4], bias_v = tensors[5];
        if (padded == out) return;
        for (Int part = 0; part < 2; part++) {
            float **places[] = {part ? &bias : &weight, part ? &bias_m : &weight_m, part ? &bias_v : &weight_v};
            float *const *given = tensors + 3 * part;
            for (Int i = 0; i < 3; i++)
                *places[i] = i && given[i] == given[0] ? *places[0] : fill(given[i], part ? 1 : in);
        }
    }

    // Back to where they came from; the parameters only if they have changed.
    void give_back(float *const *tensors, bool changed) const {
        if (padded == out) return;
        const float *found[] = {weight, weight_m, weight_v, bias, bias_m, bias_v};
        for (Int t = 0; t < 6; t++)
            if (t % 3 ? tensors[t] != tensors[t / 3 * 3] : changed)
                for (Int i = 0; i < (t < 3 ? in : 1); i++)
                    std::copy_n(found[t] + i * padded, out, tensors[t] + i * out);
    }

    // With the second derivative, if slopes in a direction follow.
    void forward(const float *x, Int batch, bool last, bool bent = false) {
        product<false>(x, weight, batch, in, padded, bias, &result[0], stride);
        if (last) return;
        if (activation.shape == RELU) {
            for (Int i = 0; i < batch * padded; i++) result[i] = result[i] > 0 ? result[i] : 0;
            return;
        }
        slopes.resize(batch * padded), bends.resize(bent ? batch * padded : 0);
        activate(activation, &result[0], &slopes[0], bent ? &bends[0] : nullptr, batch * padded);
    }

    // The derivatives of the result's rows in a direction, behind them: `x` has one for each row, or one for all.
    void forward_slopes(const float *x, Int rows, Int batch, bool last) {
        const Int size = batch * padded;
        float *values = &result[0], *along = values + size;
        product<false>(x, weight, rows, in, padded, nullptr, along, stride);
        for (Int s = batch - 1; s >= rows; s--) std::copy_n(along, padded, along + s * padded);
        if (last) return;
        if (activation.shape == RELU)
            for (Int i = 0; i < size; i++) along[i] = values[i] > 0 ? along[i] : 0;
        else
            for (Int i = 0; i < size; i++) bends[i] *= along[i], along[i] *= slopes[i];
    }

    // The gradient by the first rows of the input.
    void backward(Int rows, float *dx) {
        transposed.resize(stride * padded);
        for (Int start = 0; start < in; start += LANES) // in blocks, for the cache
            for (Int o = 0; o < padded; o++)
                for (Int i = start; i < std::min(start + LANES, in); i++) transposed[o * stride + i] = weight[i * padded + o];
        product<false>(&delta[0], &transposed[0], rows, padded, stride, nullptr, dx);
    }

    // From the gradient by the activation's result, in `delta`, to that by its input.
    void backward_activation(Int batch, Int rows) {
        const Int size = batch * padded;
        float *d = &delta[0];
        if (activation.shape == RELU) {
            for (Int at = 0; at < rows; at += batch, d += size)
                for (Int i = 0; i < size; i++) d[i] = result[i] > 0 ? d[i] : 0;
            return;
        }
        for (Int i = 0; i < size; i++) d[i] *= slopes[i];
        if (rows > batch)
            for (Int i = 0; i < size; i++) d[i] += d[size + i] * bends[i], d[size + i] *= slopes[i];
    }

    // A few rows' gradients at a time: they are used up while they are in the cache. The bias has those of `biased` rows.
    void learn(const float *x, Int rows, Int biased, const Optimizer &optimizer) {
        grad.resize(ROWS * padded);
        for (Int r = 0; r < in; r += ROWS) {
            const Int some = std::min(ROWS, in - r);
            product<true>(x + r, &delta[0], some, rows, padded, nullptr, &grad[0], stride);
            optimizer.apply(2 * number, r * padded, weight, weight_m, weight_v, &grad[0], some * padded);
        }
        bias_grad.assign(padded, 0);
        for (Int s = 0; s < biased; s++)
            for (Int o = 0; o < out; o++) bias_grad[o] += delta[s * padded + o];
        optimizer.apply(2 * number + 1, 0, bias, bias_m, bias_v, &bias_grad[0], padded);
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

// The shares of the classes that logits say, which may take their place. Returns what a logit is above the share's
// logarithm.
float softmax(const float *logits, Int classes, float *shares) {
    const float top = *std::max_element(logits, logits + classes);
    float sum = 0;
    for (Int c = 0; c < classes; c++) sum += shares[c] = std::exp(logits[c] - top);
    for (Int c = 0; c < classes; c++) shares[c] /= sum;
    return top + std::log(sum);
}

float dot(const float *a, const float *b, Int count) {
    V total{};
    for (Int i = 0; i < count; i += LANES) total += load(a + i) * load(b + i);
    float sum = 0;
    for (Int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

// A batch norm by the batch's own statistics, and a ReLU; units come in whole vectors.
struct NormRelu {
    const float *gamma, *beta;
    Int units;
    std::vector<float> spread, normed; // one over the deviation of each unit; the normed values of each row

    void forward(const float *x, Int rows, float *out) {
        spread.resize(units), normed.resize(rows * units);
        for (Int i = 0; i < units; i += LANES) {
            V mean{}, square{};
            for (Int r = 0; r < rows; r++) mean += load(x + r * units + i);
            mean /= float(rows);
            for (Int r = 0; r < rows; r++) {
                const V apart = load(x + r * units + i) - mean;
                square += apart * apart;
            }
            for (Int j = 0; j < LANES; j++) spread[i + j] = 1 / std::sqrt(square[j] / rows + 1e-5f);
            for (Int r = 0; r < rows; r++) {
                const V value = (load(x + r * units + i) - mean) * load(&spread[i]);
                store(&normed[r * units + i], value);
                const V result = value * load(gamma + i) + load(beta + i);
                store(out + r * units + i, pick(result > V{}, result, V{}));
            }
        }
    }

    // From the gradient by the norm's result, which the ReLU has let through: by its input, gamma and beta.
    void backward(const float *dy, Int rows, float *dx, float *dgamma, float *dbeta) const {
        for (Int i = 0; i < units; i += LANES) {
            V sum{}, along{};
            for (Int r = 0; r < rows; r++) {
                const V d = load(dy + r * units + i);
                sum += d, along += d * load(&normed[r * units + i]);
            }
            store(dbeta + i, sum), store(dgamma + i, along);
            const V by = load(gamma + i) * load(&spread[i]), n = V{} + float(rows);
            for (Int r = 0; r < rows; r++) {
                const V d = load(dy + r * units + i), z = load(&normed[r * units + i]);
                store(dx + r * units + i, by * (d - sum / n - z * (along / n)));
            }
        }
    }
};

enum LossKind : Int { PLAIN, CONTRAST, MIXTURE, PRACTICE };

// What is minimized instead of the mean cross-entropy; as in mlp.py.
struct Loss {
    Int kind;
    double first, second;         // contrast: weight, temperature; mixture: ratio, Taylor's or not; practice: two weights
    const float *const *held;     // contrast: features wanted and unwanted of all samples; practice: a generator
    const void *const *drawn;     // of each step; mixture: a sample and its label's shares; practice: labels and noise
    Int drawn_rows, noise, hidden; // of practice

    // MOON's term, softplus((cos(z, unwanted) - cos(z, wanted)) / temperature), and its gradient, which the layer below
    // has let through to its activation's input.
    float contrast(Layer &below, const Int *order, Int batch) const {
        const float weight = first, temperature = second, tiny = 1e-8;
        const Int width = below.padded;
        const float *z = &below.result[0], *slopes = below.activation.shape == RELU ? nullptr : &below.slopes[0];
        float loss = 0, *dz = &below.delta[0];
        for (Int s = 0; s < batch; s++, z += width, dz += width) {
            const float *wanted = held[0] + order[s] * width, *unwanted = held[1] + order[s] * width;
            const float length = std::max(std::sqrt(dot(z, z, width)), tiny);
            const float good = 1 / (length * std::max(std::sqrt(dot(wanted, wanted, width)), tiny));
            const float bad = 1 / (length * std::max(std::sqrt(dot(unwanted, unwanted, width)), tiny));
            const float gap = dot(z, unwanted, width) * bad - dot(z, wanted, width) * good, t = gap / temperature;
            loss += std::max(t, 0.f) + std::log1p(std::exp(-std::abs(t)));
            const float slope = weight / (batch * temperature * (1 + std::exp(-t))), own = gap / (length * length);
            if (!slopes)
                for (Int i = 0; i < width; i++)
                    dz[i] += z[i] > 0 ? slope * (unwanted[i] * bad - wanted[i] * good - own * z[i]) : 0;
            else
                for (Int i = 0; i < width; i++)
                    dz[i] += slopes[s * width + i] * slope * (unwanted[i] * bad - wanted[i] * good - own * z[i]);
        }
        return weight * loss / batch;
    }

    // FedMix's: labels that are mixed with shares of all classes, and the slope of the loss in a direction, of which the
    // last layer's result has the logits' slopes behind them.
    float mixture(Layer &last, const Int *y, Int batch, const float *shares) const {
        const float ratio = first;
        const Int classes = last.out, behind = batch * last.padded;
        float loss = 0;
        for (Int s = 0; s < batch; s++) {
            float *delta = &last.delta[s * last.padded];
            const float *logits = &last.result[s * last.padded], *slopes = logits + behind;
            const float base = softmax(logits, classes, delta);
            float total = 0, own = 0, mean = 0;
            for (Int c = 0; c < classes; c++) {
                total += shares[c], own += shares[c] * (base - logits[c]);
                if (second) mean += delta[c] * slopes[c];
            }
            loss += ratio * own + (1 - ratio) * (base - logits[y[s]]) + (second ? ratio * (mean - slopes[y[s]]) : 0);
            for (Int c = 0; c < classes; c++) {
                const float p = delta[c], wrong = p - (c == y[s]);
                delta[c] = ((1 - ratio) * wrong + ratio * (total * p - shares[c])) / batch;
                if (second) {
                    delta[c] += ratio * p * (slopes[c] - mean) / batch;
                    delta[behind + c] = ratio * wrong / batch;
                }
            }
            std::fill(delta + classes, delta + last.padded, 0.f);
            if (second) std::fill(delta + behind + classes, delta + behind + last.padded, 0.f);
        }
        return loss / batch;
    }

    // FedGen's features for labels, one for each row of noise. The generator is (noise + classes, hidden), a batch norm,
    // ReLU and (hidden, width).
    void generate(const Int *labels, Int rows, const float *z, Int width, std::vector<float> &h, float *out) const {
        const float *weight = held[0], *bias = held[1];
        h.resize(rows * hidden);
        product<false>(z, weight, rows, noise, hidden, bias, &h[0]);
        for (Int r = 0; r < rows; r++)
            for (Int i = 0; i < hidden; i++) h[r * hidden + i] += weight[(noise + labels[r]) * hidden + i];
        NormRelu{held[2], held[3], hidden, {}, {}}.forward(&h[0], rows, &h[0]);
        product<false>(&h[0], held[4], rows, hidden, width, held[5], out);
    }

    // FedGen's: what the head makes of features generated for the samples' labels is wanted of the samples, too; and those
    // generated for other labels, which lie behind the samples' own, shall be given these. `said` has the logits of all.
    float practice(Layer &last, const Int *y, Int batch, const Int *labels, const float *said) const {
        const Int classes = last.out, padded = last.padded;
        std::vector<float> found(classes), wanted(classes);
        float wrong = 0, apart = 0, loss = cross_entropy(last, y, batch);
        for (Int s = 0; s < batch; s++, said += padded) {
            const float *logits = &last.result[s * padded];
            float *delta = &last.delta[s * padded];
            const float base = softmax(logits, classes, &found[0]) - softmax(said, classes, &wanted[0]);
            for (Int c = 0; c < classes; c++) {
                apart += wanted[c] * (said[c] - logits[c] + base);
                delta[c] += float(second) * (found[c] - wanted[c]) / batch;
            }
        }
        for (Int s = 0; s < drawn_rows; s++, said += padded) {
            float *delta = &last.delta[(batch + s) * padded];
            wrong += softmax(said, classes, delta) - said[labels[s]];
            for (Int c = 0; c < classes; c++)
                delta[c] = float(first) * (delta[c] - (c == labels[s])) / drawn_rows;
            std::fill(delta + classes, delta + padded, 0.f);
        }
        return loss + float(first) * wrong / drawn_rows + float(second) * apart / batch;
    }
};

} // namespace

// What the last layer sees of samples. `tensors` has two a layer: weight and bias.
extern "C" void mlp_features(const float *x, Int count, Int layers, const Int *sizes, const Activation *activations,
                             float *const *tensors, float *out) {
    const Int batch = 32, width = sizes[layers - 1];
    std::vector<Layer> net(layers - 1);
    for (Int l = 0; l < layers - 1; l++) {
        Layer &layer = net[l];
        layer.in = sizes[l], layer.out = sizes[l + 1], layer.padded = whole_vectors(layer.out);
        layer.stride = l ? net[l - 1].padded : layer.in, layer.activation = activations[l];
        float *const *given = tensors + 2 * l;
        float *const six[] = {given[0], given[0], given[0], given[1], given[1], given[1]};
        layer.own(six);
        layer.result.resize(batch * layer.padded);
    }
    const Layer &last = net[layers - 2];
    for (Int at = 0; at < count; at += batch) {
        const Int size = std::min(batch, count - at);
        for (Int l = 0; l < layers - 1; l++)
            net[l].forward(l ? &net[l - 1].result[0] : x + at * sizes[0], size, false);
        for (Int s = 0; s < size; s++) std::copy_n(&last.result[s * last.padded], width, out + (at + s) * width);
    }
}

// `tensors` has six a layer: weight, its moments, bias, its moments. Features and the generator's last layer, in the loss,
// are as wide as the last hidden layer when it is filled up.
extern "C" void mlp_train(const float *x, const Int *y, const Int *order, Int count, Int batch, Int layers,
                          const Int *sizes, const Activation *activations, float *const *tensors, Int kind, Int done,
                          double rate, double beta1, double beta2, double eps, double decay, double scale,
                          float *const *reference, float *const *shift, const Loss *loss, float *losses) {
    batch = std::min(batch, count);
    const bool taylor = loss->kind == MIXTURE && loss->second;
    const Int behind = taylor ? batch : loss->kind == PRACTICE ? loss->drawn_rows : 0;
    std::vector<Layer> net(layers);
    std::vector<float *> corrections[] = {{reference, reference + 2 * layers}, {shift, shift + 2 * layers}};
    for (Int l = 0; l < layers; l++) {
        Layer &layer = net[l];
        layer.number = l, layer.in = sizes[l], layer.out = sizes[l + 1], layer.padded = whole_vectors(layer.out);
        layer.stride = l ? net[l - 1].padded : layer.in;
        if (l < layers - 1) layer.activation = activations[l];
        layer.own(tensors + 6 * l);
        for (auto &some : corrections)
            for (Int t = 0; t < 2; t++)
                if (float *&given = some[2 * l + t]; given && layer.padded != layer.out)
                    given = layer.fill(given, t ? 1 : layer.in);
        layer.result.resize((batch + behind) * layer.padded);
        layer.delta.resize((batch + behind) * layer.padded);
    }
    const Affine affine{scale, &corrections[0][0], &corrections[1][0]};
    Optimizer optimizer{Kind(kind), rate, beta1, beta2, eps, decay, done, affine};
    Layer &last = net[layers - 1];
    const Int inputs = sizes[0], width = last.stride;
    std::vector<float> samples((batch + 1) * inputs), hidden, generated, said;
    std::vector<Int> labels(batch + behind);
    const void *const *drawn = loss->drawn;
    for (Int at = 0; at < count; at += batch, order += batch) {
        const Int size = std::min(batch, count - at);
        for (Int s = 0; s < size; s++) {
            std::copy_n(x + order[s] * inputs, inputs, &samples[s * inputs]);
            labels[s] = y[order[s]];
        }
        auto input = [&](Int l) { return l ? &net[l - 1].result[0] : &samples[0]; };
        if (loss->kind == MIXTURE) {
            const float ratio = loss->first, *other = (const float *)drawn[0];
            for (Int s = 0; s < size; s++)
                for (Int i = 0; i < inputs; i++) {
                    float &value = samples[s * inputs + i];
                    value = taylor ? (1 - ratio) * value : (1 - ratio) * value + ratio * other[i];
                }
            std::copy_n(other, inputs, &samples[size * inputs]);
        }
        for (Int l = 0; l < layers; l++) {
            Layer &layer = net[l];
            layer.forward(input(l), size, l == layers - 1, taylor);
            if (taylor) layer.forward_slopes(input(l) + size * layer.stride, l ? size : 1, size, l == layers - 1);
        }
        if (loss->kind == MIXTURE) {
            *losses++ = loss->mixture(last, &labels[0], size, (const float *)drawn[1]);
            drawn += 2;
        } else if (loss->kind == PRACTICE) {
            const Int rows = size + loss->drawn_rows;
            const Int *others = (const Int *)drawn[0];
            std::copy_n(others, loss->drawn_rows, &labels[size]);
            generated.resize(rows * width), said.resize(rows * last.padded);
            loss->generate(&labels[0], rows, (const float *)drawn[1], width, hidden, &generated[0]);
            product<false>(&generated[0], last.weight, rows, last.in, last.padded, last.bias, &said[0], width);
            std::copy_n(&generated[size * width], loss->drawn_rows * width, input(layers - 1) + size * width);
            *losses++ = loss->practice(last, &labels[0], size, others, &said[0]);
            drawn += 2;
        } else
            *losses++ = cross_entropy(last, &labels[0], size);
        optimizer.next();
        if (kind == SUM) optimizer.rate = rate * size / count;
        for (Int l = layers - 1; l >= 0; l--) {
            Layer &layer = net[l];
            if (l) {
                const Int below = taylor ? 2 * size : size;
                layer.backward(below, &net[l - 1].delta[0]);
                net[l - 1].backward_activation(size, below);
            }
            if (l == layers - 1 && loss->kind == CONTRAST) losses[-1] += loss->contrast(net[l - 1], order, size);
            Int rows = size, biased = size;
            if (taylor && l) rows = 2 * size;
            if (taylor && !l) { // there, all samples have the same direction
                float *delta = &layer.delta[0], *sum = delta + size * layer.padded;
                for (Int s = 1; s < size; s++)
                    for (Int i = 0; i < layer.padded; i++) sum[i] += sum[s * layer.padded + i];
                rows = size + 1;
            }
            if (l == layers - 1 && loss->kind == PRACTICE) rows = biased = size + loss->drawn_rows;
            layer.learn(input(l), rows, biased, optimizer);
        }
    }
    for (Int l = 0; l < layers; l++) net[l].give_back(tensors + 6 * l, kind != SUM);
}

// FedGen's generator, (noise + classes, hidden), a batch norm, ReLU and (hidden, width), is trained with Adam against many
// heads, whose columns lie side by side, filled up to whole vectors. `tensors` has three each: weight, bias, gamma, beta,
// weight, bias, with their moments; `drawn` has labels and noise for each step.
extern "C" void generator_train(const void *const *drawn, Int steps, Int batch, const Int *sizes, float *const *tensors,
                                Int heads, const float *head, const float *head_bias, const float *head_transposed,
                                const float *trust, double diversity, Int done, double rate, double beta1, double beta2,
                                double eps, double decay, float *losses) {
    const Int noise = sizes[0], classes = sizes[1], hidden = sizes[2], width = sizes[3], inputs = noise + classes;
    const Int columns = whole_vectors(heads * classes);
    float *const nothing[6] = {};
    Optimizer adam{ADAM, rate, beta1, beta2, eps, decay, done, {0, nothing, nothing}};
    Layer first, last;
    Layer *layers[] = {&first, &last};
    for (Int l = 0; l < 2; l++) {
        Layer &layer = *layers[l];
        layer.number = l, layer.in = layer.stride = l ? hidden : inputs, layer.out = layer.padded = l ? width : hidden;
        layer.own(tensors + 12 * l);
        layer.result.resize(batch * layer.padded), layer.delta.resize(batch * layer.padded);
    }
    NormRelu norm{tensors[6], tensors[9], hidden, {}, {}};
    std::vector<float> input(batch * inputs), h(batch * hidden), dh(batch * hidden), dgamma(hidden), dbeta(hidden);
    const Int filled = whole_vectors(batch);
    std::vector<float> logits(batch * columns), signs(batch * width), turned(noise * filled), unlike(filled);
    for (Int step = 0; step < steps; step++, drawn += 2) {
        const Int *labels = (const Int *)drawn[0];
        const float *z = (const float *)drawn[1];
        std::fill(input.begin(), input.end(), 0.f);
        for (Int s = 0; s < batch; s++) {
            std::copy_n(z + s * noise, noise, &input[s * inputs]);
            input[s * inputs + noise + labels[s]] = 1;
            for (Int i = 0; i < noise; i++) turned[i * filled + s] = z[s * noise + i];
        }
        first.forward(&input[0], batch, true);
        norm.forward(&first.result[0], batch, &h[0]);
        last.forward(&h[0], batch, true);
        // What the heads say: the mean over the batch of their cross-entropies, each as much as it is trusted.
        product<false>(&last.result[0], head, batch, width, columns, head_bias, &logits[0]);
        float wrong = 0;
        for (Int s = 0; s < batch; s++) {
            float *row = &logits[s * columns];
            for (Int k = 0; k < heads; k++, row += classes) {
                const float weight = trust[k * classes + labels[s]] / batch;
                const float right = row[labels[s]];
                wrong += weight * (softmax(row, classes, row) - right);
                for (Int c = 0; c < classes; c++) row[c] = weight * (row[c] - (c == labels[s]));
            }
            std::fill(row, &logits[0] + (s + 1) * columns, 0.f);
        }
        product<false>(&logits[0], head_transposed, batch, columns, width, nullptr, &last.delta[0]);
        // How far features are apart, each pair as much as its noise; and the gradient of that, but for a factor.
        std::fill(signs.begin(), signs.end(), 0.f);
        double total = 0;
        for (Int s = 0; s < batch; s++) {
            const float *own = &last.result[s * width];
            float *sign = &signs[s * width];
            for (Int r = 0; r < filled; r += LANES) {
                V square{};
                for (Int i = 0; i < noise; i++) {
                    const V d = load(&turned[i * filled + r]) - z[s * noise + i];
                    square += d * d;
                }
                store(&unlike[r], square / float(noise));
            }
            for (Int r = 0; r < batch; r++) {
                const float *other = &last.result[r * width];
                V length{};
                const V by = V{} + unlike[r];
                for (Int i = 0; i < width; i += LANES) {
                    const V d = load(own + i) - load(other + i);
                    length += pick(d > V{}, d, -d);
                    store(sign + i, load(sign + i) + pick(d > V{}, by, pick(d < V{}, -by, V{})));
                }
                float sum = 0;
                for (Int i = 0; i < LANES; i++) sum += length[i];
                total += double(unlike[r]) * sum;
            }
        }
        const double pairs = double(batch) * batch * width;
        const float alike = diversity * std::exp(-total / pairs), factor = -2 * alike / pairs;
        for (Int i = 0; i < batch * width; i++) last.delta[i] += factor * signs[i];
        losses[step] = wrong + alike;
        adam.next();
        last.backward(batch, &dh[0]);
        for (Int i = 0; i < batch * hidden; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
        norm.backward(&dh[0], batch, &first.delta[0], &dgamma[0], &dbeta[0]);
        last.learn(&h[0], batch, batch, adam);
        adam.apply(0, 0, tensors[6], tensors[7], tensors[8], &dgamma[0], hidden);
        adam.apply(0, 0, tensors[9], tensors[10], tensors[11], &dbeta[0], hidden);
        first.learn(&input[0], batch, batch, adam);
    }
}
