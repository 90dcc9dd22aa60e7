// SPDX-License-Identifier: Apache-2.0
// Provides the tensors that a call fills: the caller's own, or new ones of the caller's framework, which the call
// returns.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>

#include <initializer_list>
#include <vector>

#include "arguments.h"

namespace mla::python {

/// Allocates a tensor with the framework whose tensors the call was given; if that does not let libmla allocate, the
/// memory is this library's on the CPU, and elsewhere ValueError is raised.
ffi::Tensor allocate(const char* operation, std::string_view field, DType dtype, std::initializer_list<int64_t> shape,
                     Device device);

class Outputs {
 public:
  /// Says when outputs get their memory. With kLater, tensors that are not given become views without memory, which is
  /// all that a plan looks at.
  enum class Memory : uint8_t { kNow, kLater };

  Outputs(const Arguments& args, Memory memory) : args_(args), memory_(memory) {}

  /// Makes an output that the caller did not give.
  void make(TensorView& output, const char* field, DType dtype, std::initializer_list<int64_t> shape, Device device);

  /// Returns the new tensors in order: None, one tensor, or an array.
  ffi::Any take();

 private:
  const Arguments& args_;
  Memory memory_;
  std::vector<ffi::Tensor> made_;
};

}  // namespace mla::python
