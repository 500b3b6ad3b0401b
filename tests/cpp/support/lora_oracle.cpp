#include "support/lora_oracle.h"

#include <cmath>

#include "support/philox_reference.h"

namespace loraaccel::test {
namespace {

Matrix absolute(const Matrix& m) {
  Matrix out = m;
  for (double& v : out.values) v = std::abs(v);
  return out;
}

Matrix transposed(const Matrix& m) {
  Matrix out(m.cols, m.rows);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) out(j, i) = m(i, j);
  }
  return out;
}

// a b^T: both operands are read along their rows.
Matrix product(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < b.rows; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.cols; ++k) sum += a(i, k) * b(j, k);
      out(i, j) = sum;
    }
  }
  return out;
}

// The factors of D: 0 or 1 / (1 - p).
Matrix dropout_factors(const OracleAdapter& ad, int64_t rows, int64_t cols) {
  Matrix factors(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const bool keeps = ad.p <= 0 || dropout_keeps(ad.p, ad.seed, ad.offset, i, j);
      factors(i, j) = keeps ? 1 / (1 - ad.p) : 0;
    }
  }
  return factors;
}

Matrix times(const Matrix& a, const Matrix& b) {
  Matrix out = a;
  for (size_t i = 0; i < out.values.size(); ++i) out.values[i] *= b.values[i];
  return out;
}

Matrix gated(Matrix h, const OracleAdapter& ad) {
  for (const Matrix& gate : ad.gates) h = times(h, gate);
  return h;
}

// out += scale * value, and the same of the absolute terms.
void accumulate(ExactMatrix* out, double scale, const Matrix& value, const Matrix& terms) {
  for (size_t i = 0; i < out->values.size(); ++i) {
    out->values[i].value += scale * value.values[i];
    out->values[i].terms += std::abs(scale) * terms.values[i];
  }
}

ExactMatrix exact_product(const Matrix& a, const Matrix& b, double scale = 1) {
  ExactMatrix out(a.rows, b.rows);
  accumulate(&out, scale, product(a, b), product(absolute(a), absolute(b)));
  out.count = a.cols;
  return out;
}

// What is there so far is stored before more is added.
void store(ExactMatrix* out) {
  for (Exact& e : out->values) e.stored += std::abs(e.value);
}

}  // namespace

OracleForward oracle_forward(const OracleLayer& layer) {
  const int64_t rows = layer.x.rows;
  OracleForward out;
  out.y = exact_product(layer.x, layer.w);
  if (layer.bias) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < out.y.cols; ++n) {
        out.y(m, n).value += (*layer.bias)(n, 0);
        out.y(m, n).terms += std::abs((*layer.bias)(n, 0));
      }
    }
  }
  store(&out.y);
  int64_t total_rank = 0;
  for (const OracleAdapter& ad : layer.adapters) total_rank += ad.a.rows;
  out.h = ExactMatrix(rows, total_rank);
  out.h.count = layer.x.cols;
  out.y.count += total_rank + 1;
  int64_t column = 0;
  for (const OracleAdapter& ad : layer.adapters) {
    const Matrix x = times(layer.x, dropout_factors(ad, rows, layer.x.cols));
    const Matrix h = gated(product(x, ad.a), ad);
    const Matrix h_terms = gated(product(absolute(x), absolute(ad.a)), ad);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t r = 0; r < h.cols; ++r) out.h(m, column + r) = {h(m, r), h_terms(m, r), 0};
    }
    accumulate(&out.y, ad.scale, product(h, ad.b), product(h_terms, absolute(ad.b)));
    column += ad.a.rows;
  }
  return out;
}

OracleBackward oracle_backward(const OracleLayer& layer, const Matrix& dy, const Matrix& h) {
  const int64_t rows = layer.x.rows;
  const Matrix dy_t = transposed(dy);
  const Matrix ones = [&] {
    Matrix m(1, rows);
    for (double& v : m.values) v = 1;
    return m;
  }();
  OracleBackward out;
  out.dx = exact_product(dy, transposed(layer.w));
  store(&out.dx);
  out.dw = exact_product(dy_t, transposed(layer.x));
  out.dbias = exact_product(dy_t, ones);
  int64_t column = 0;
  for (const OracleAdapter& ad : layer.adapters) {
    const Matrix factors = dropout_factors(ad, rows, layer.x.cols);
    const Matrix x = times(layer.x, factors);
    const Matrix u = gated(product(dy, transposed(ad.b)), ad);
    const Matrix u_terms = gated(product(absolute(dy), absolute(transposed(ad.b))), ad);
    accumulate(&out.dx, ad.scale, times(product(u, transposed(ad.a)), factors),
               times(product(u_terms, absolute(transposed(ad.a))), factors));
    out.dx.count += ad.a.rows;

    ExactMatrix da(ad.a.rows, ad.a.cols);
    accumulate(&da, ad.scale, product(transposed(u), transposed(x)),
               product(transposed(u_terms), absolute(transposed(x))));
    da.count = rows + dy.cols;
    out.da.push_back(std::move(da));

    Matrix part(rows, ad.a.rows);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t r = 0; r < ad.a.rows; ++r) part(m, r) = h(m, column + r);
    }
    out.db.push_back(exact_product(dy_t, transposed(part), ad.scale));
    column += ad.a.rows;
  }
  return out;
}

}  // namespace loraaccel::test
