// SPDX-License-Identifier: Apache-2.0
// Holds whole sequences whose groups compress pools, their latents by definition, and calls that compress a part.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <ostream>
#include <utility>
#include <vector>

#include "problems.h"
#include "random_problems.h"
#include "reference/reference.h"

namespace mla::reference {

/// Describes how latents are made.
struct Form {
  int32_t ratio = 2;
  bool overlap = false, bias = true, norm = true;
  int32_t d_latent = 2;
  DType dtype = DType::kF32;

  int32_t width() const { return overlap ? 2 * d_latent : d_latent; }
  int32_t span() const { return overlap ? 2 * ratio : ratio; }
  /// Returns the rows of a state that are enough if at most `rejected` tokens in a row are rejected.
  int32_t rows(int32_t rejected = 0) const { return rejected + span() - 1; }

  friend std::ostream& operator<<(std::ostream& out, const Form& f) {
    return out << "ratio " << f.ratio << (f.overlap ? ", overlap" : "") << (f.bias ? ", bias" : "")
               << (f.norm ? ", norm, " : ", ") << name(f.dtype);
  }
};

/// Holds the parameters of a layer.
struct Layer {
  Form form;
  std::vector<float> bias, norm;

  Layer(const Form& of, Random& random)
      : form(of), bias(static_cast<size_t>(of.ratio * of.width())), norm(static_cast<size_t>(of.d_latent)) {
    for (float& value : bias) value = random.normal();
    for (float& value : norm) value = 1 + random.normal();
  }
};

/// Holds the tokens of a request.
struct Sequence {
  Tensor kv, score;

  Sequence(const Form& form, int64_t tokens, Random& random)
      : kv(form.dtype, tokens, form.width()), score(form.dtype, tokens, form.width()) {
    kv.fill(random, 2.0F);
    score.fill(random, 1.5F);
  }
  /// Replaces a token by that of another sequence.
  void replace(int64_t position, const Sequence& by) {
    for (auto [to, from] : {std::pair(&kv, &by.kv), std::pair(&score, &by.score)}) {
      const auto row = static_cast<size_t>(to->width) * size_of(to->dtype);
      std::memcpy(&to->bytes[static_cast<size_t>(position) * row], &from->bytes[static_cast<size_t>(position) * row],
                  row);
    }
  }
};

using Latent = std::vector<float>;
using Latents = std::map<int64_t, Latent>;  // by the last position of a group

/// Computes by its definition the latent of the group that ends at `last`. Tokens for which `known` is false are left
/// out.
template <class Known>
std::vector<double> by_definition(const Layer& layer, const Sequence& sequence, int64_t last, const Known& known) {
  const Form& form = layer.form;
  std::vector<double> latent;
  double squares = 0;
  for (int32_t c = 0; c < form.d_latent; ++c) {
    double sum = 0, weighted = 0;
    for (int64_t p = std::max<int64_t>(last - form.span() + 1, 0); p <= last; ++p) {
      if (!known(p)) continue;
      const int32_t channel = form.overlap && p > last - form.ratio ? form.d_latent + c : c;
      auto score = static_cast<float>(sequence.score.at(p, channel));
      if (form.bias) score += layer.bias[static_cast<size_t>(p % form.ratio * form.width() + channel)];
      const double weight = form.ratio == 1 ? 1.0 : std::exp(static_cast<double>(score));
      sum += weight;
      weighted += weight * sequence.kv.at(p, channel);
    }
    latent.push_back(weighted / sum);
    squares += latent.back() * latent.back();
  }
  const double root = std::sqrt(squares / form.d_latent + static_cast<double>(1e-6F));
  for (size_t c = 0; form.norm && c < latent.size(); ++c) latent[c] *= static_cast<double>(layer.norm[c]) / root;
  return latent;
}

inline bool all_known(int64_t) { return true; }

/// Expects a latent to be what the definition says, rounded to f32, which is within 2^-24 of it. Both are sums of at
/// most 256 products of doubles, whose terms are below 16, and roots of them: their own error is below 256 * 2^-52 * 16
/// before the norm, which multiplies it by the weight, below 8, and divides it by a root, mostly above 2^-7.
inline void expect_near(const Latent& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t c = 0; c < actual.size(); ++c)
    EXPECT_NEAR(static_cast<double>(actual[c]), expected[c],
                std::fabs(expected[c]) * 0x1p-24 + 256 * 0x1p-52 * 16 * 8 * 128)
        << "channel " << c;
}

/// Holds the states of all requests. Rows not yet written hold NaN.
struct States {
  int32_t block_size, num_columns;
  std::vector<float> rows;

  States(const Form& form, int32_t num_blocks, int32_t block, int32_t columns)
      : block_size(block),
        num_columns(columns),
        rows(static_cast<size_t>(num_blocks * block * 2 * form.width()), kNan) {}
};

/// Describes what a request adds in a call: tokens [begin, end) of a sequence.
struct Part {
  const Sequence* sequence;
  int64_t begin, end;
  std::vector<int32_t> blocks = {};  // its row of the table; empty: 0, 1, 2 ...
  int32_t padding = 0;               // rows before the first token; begin is 0 then
};

/// Holds a call's tensors; `args` points into them.
struct Call {
  Tensor kv, score;
  std::vector<int32_t> qo_indptr = {0}, kv_len, table;
  Latent latent;
  core::CompressArgs args;

  Call(const Layer& layer, States& states, const std::vector<Part>& parts)
      : kv(layer.form.dtype, num_rows(parts), layer.form.width()), score(kv) {
    const Form& form = layer.form;
    const auto row = static_cast<size_t>(form.width()) * size_of(form.dtype);
    for (const Part& part : parts) {
      const size_t from = static_cast<size_t>(part.begin) * row, bytes = static_cast<size_t>(part.end) * row - from;
      const size_t to = static_cast<size_t>(qo_indptr.back() + part.padding) * row;
      if (bytes > 0) {
        std::memcpy(&kv.bytes[to], &part.sequence->kv.bytes[from], bytes);
        std::memcpy(&score.bytes[to], &part.sequence->score.bytes[from], bytes);
      }
      qo_indptr.push_back(qo_indptr.back() + part.padding + static_cast<int32_t>(part.end - part.begin));
      kv_len.push_back(static_cast<int32_t>(part.end));
      for (int32_t column = 0; column < states.num_columns; ++column)
        table.push_back(part.blocks.empty() ? column : part.blocks[static_cast<size_t>(column)]);
    }
    latent.assign(static_cast<size_t>(qo_indptr.back() * form.d_latent), kUntouched);
    args.batch_size = static_cast<int32_t>(parts.size());
    args.num_tokens = qo_indptr.back();
    args.d_latent = form.d_latent;
    args.ratio = form.ratio;
    args.overlap = form.overlap;
    args.dtype = form.dtype;
    args.kv = kv.bytes.data();
    args.score = score.bytes.data();
    args.kv_stride_token = args.score_stride_token = form.width();
    args.position_bias = form.bias ? layer.bias.data() : nullptr;
    args.position_bias_stride_position = form.width();
    args.queries.indptr = qo_indptr.data();
    args.kv_len = kv_len.data();
    if (form.ratio > 1) {
      args.state = states.rows.data();
      args.state_stride_row = 2 * form.width();
      args.state_stride_block = states.block_size * args.state_stride_row;
      args.num_blocks = static_cast<int64_t>(states.rows.size()) / args.state_stride_block;
      args.block_size = states.block_size;
      args.state_table = table.data();
      args.num_columns = states.num_columns;
      args.state_table_stride_request = states.num_columns;
    }
    args.norm_weight = form.norm ? layer.norm.data() : nullptr;
    args.norm_eps = 1e-6F;
    args.latent = latent.data();
    args.latent_dtype = DType::kF32;
    args.latent_stride_token = form.d_latent;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// Returns the latents of a request, and checks that no other row was written.
  Latents of(const Part& part, int32_t request) const {
    Latents latents;
    for (int64_t i = qo_indptr[static_cast<size_t>(request)]; i < qo_indptr[static_cast<size_t>(request) + 1]; ++i) {
      const int64_t position = part.end - qo_indptr[static_cast<size_t>(request) + 1] + i;
      const auto at = latent.begin() + i * args.d_latent;
      const Latent row(at, at + args.d_latent);
      if (position >= 0 && (position + 1) % args.ratio == 0)
        latents[position] = row;
      else
        EXPECT_EQ(row, Latent(static_cast<size_t>(args.d_latent), kUntouched)) << "position " << position;
    }
    return latents;
  }

 private:
  static constexpr float kUntouched = 12345.0F;

  static int64_t num_rows(const std::vector<Part>& parts) {
    int64_t rows = 0;
    for (const Part& part : parts) rows += part.padding + part.end - part.begin;
    return rows;
  }
};

using Compute = std::function<void(const core::CompressArgs&)>;

inline std::vector<Latents> run(const Layer& layer, States& states, const std::vector<Part>& parts,
                                const Compute& compute = compress) {
  Call call(layer, states, parts);
  compute(call.args);
  std::vector<Latents> latents;
  for (size_t i = 0; i < parts.size(); ++i) latents.push_back(call.of(parts[i], static_cast<int32_t>(i)));
  return latents;
}

/// Returns the latents of the first `tokens` tokens of a sequence, made by one call.
inline Latents at_once(const Layer& layer, const Sequence& sequence, int64_t tokens,
                       const Compute& compute = compress) {
  States states(layer.form, 1, layer.form.rows() + 1, 1);
  return run(layer, states, {{&sequence, 0, tokens}}, compute)[0];
}

/// Returns the latents of those groups that end in [begin, end).
inline Latents between(const Latents& latents, int64_t begin, int64_t end) {
  return {latents.lower_bound(begin), latents.lower_bound(end)};
}

}  // namespace mla::reference
