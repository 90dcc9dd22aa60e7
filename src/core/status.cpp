// SPDX-License-Identifier: Apache-2.0
#include "mla/status.h"

#include <algorithm>

#include "core/marks.h"

namespace mla {
namespace {

std::string named(std::string_view field, std::span<const FieldName> names) {
  for (const FieldName& known : names) {
    if (field == known.field) return std::string(known.name);
    if (known.field.ends_with('.') && field.starts_with(known.field))
      return std::string(known.name).append(field.substr(known.field.size()));
  }
  return std::string(field);
}

}  // namespace

Status Status::naming_fields(StatusCode code, std::string text) {
  std::string plain = text;
  std::erase(plain, '`');
  Status status(code, std::move(plain));
  status.marked_ = std::move(text);
  return status;
}

Status Status::renamed(std::span<const FieldName> names) const {
  if (marked_.empty()) return *this;
  return naming_fields(
      code_, core::replace_marked(marked_, [&](std::string_view field) { return '`' + named(field, names) + '`'; }));
}

}  // namespace mla
