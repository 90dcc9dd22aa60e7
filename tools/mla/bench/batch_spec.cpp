// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/batch_spec.h"

#include <cctype>
#include <string>

#include "mla/text.h"

namespace mla::bench {
namespace {

constexpr int64_t kMaxRequests = 65536;
constexpr int64_t kMaxLength = int64_t{1} << 30;

// Reads one segment from left to right.
class SegmentReader {
 public:
  SegmentReader(std::string_view where, std::string_view segment) : where_(where), segment_(segment) {}

  bool at_digit() const { return pos_ < segment_.size() && std::isdigit(static_cast<unsigned char>(segment_[pos_])); }
  bool done() const { return pos_ == segment_.size(); }

  bool accept(std::string_view token) {
    if (segment_.substr(pos_, token.size()) != token) return false;
    pos_ += token.size();
    return true;
  }

  int64_t number(int64_t min, int64_t max, std::string_view what, bool suffix) {
    if (!at_digit()) fail(what);
    int64_t value = 0;
    while (at_digit() && value <= max) value = value * 10 + (segment_[pos_++] - '0');
    // The k of "q4kv1k" belongs to "kv".
    const bool kv_follows = segment_.substr(pos_, 2) == "kv";
    if (suffix && !kv_follows && (accept("k") || accept("K"))) value *= 1024;
    if (value < min || value > max)
      throw cli::UsageError("{}: in '{}', expected {} between {} and {}", where_, segment_, what, min, max);
    return value;
  }

  [[noreturn]] void fail(std::string_view expected) const {
    throw cli::UsageError("{}: expected segments like 8q1s4k joined by '_'; in '{}', expected {} at '{}'", where_,
                          segment_, expected, segment_.substr(pos_));
  }

 private:
  std::string_view where_, segment_;
  size_t pos_ = 0;
};

}  // namespace

std::vector<Request> parse_batch_spec(std::string_view where, std::string_view text) {
  std::vector<Request> requests;
  while (true) {
    const size_t end = text.find('_');
    SegmentReader reader(where, text.substr(0, end));
    const int64_t count = reader.at_digit() ? reader.number(1, kMaxRequests, "a count", false) : 1;
    if (!reader.accept("q")) reader.fail("'q' and a query length");
    const int64_t q_len = reader.number(1, kMaxLength, "a query length", true);
    int64_t kv_len = q_len;
    if (reader.accept("s") || reader.accept("kv")) kv_len = reader.number(0, kMaxLength, "a kv length", true);
    if (!reader.done()) reader.fail("'s' and a kv length, or the end");
    if (static_cast<int64_t>(requests.size()) + count > kMaxRequests)
      throw cli::UsageError("{}: expected at most {} requests", where, kMaxRequests);
    requests.insert(requests.end(), static_cast<size_t>(count), Request{.q_len = q_len, .kv_len = kv_len});
    if (end == std::string_view::npos) return requests;
    text.remove_prefix(end + 1);
  }
}

}  // namespace mla::bench
