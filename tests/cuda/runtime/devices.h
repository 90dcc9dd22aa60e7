// SPDX-License-Identifier: Apache-2.0
// Lists the GPUs that tests of this folder run on, and holds memory of them that the host cannot reach.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kit/case_buffers.h"
#include "kit/device.h"
#include "kit/kit.h"
#include "mla/mla.h"

namespace mla::test {

/// Returns every architecture that this build emulates, and this machine's first GPU.
inline std::vector<std::string> devices() {
  std::vector<std::string> all;
  for (const int32_t arch : machine_info().emulated_archs) all.push_back("emulated:sm" + std::to_string(arch));
  if (Gpu::open("cuda").ok()) all.emplace_back("cuda:0");
  return all;
}

/// Returns one device of each kind: an emulated one for every backend, and the real one.
inline std::vector<std::string> few_devices() {
  std::vector<std::string> few;
  std::set<std::string> seen;
  for (const std::string& device : devices()) {
    const size_t before = seen.size();
    for (std::string& backend : kit::gpu_backends(kit::arch_of(device))) seen.insert(std::move(backend));
    if (seen.size() > before || !device.starts_with("emulated:")) few.push_back(device);
  }
  return few;
}

/// Returns the row that computes the problem of a spec there.
template <class Spec>
std::string row_on(const std::string& device, const Spec& spec) {
  return explain(kit::on_device(kit::problem_of(spec), device)).selected;
}

inline std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

inline Context context_on(const std::string& device, int32_t num_threads = 2) {
  Result<Context> context = Context::create({.num_threads = num_threads, .device = device});
  EXPECT_EQ(context.status().message(), "");
  return std::move(context).value();
}

/// Holds pages of host memory that can be taken away, to see whether somebody looks.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(rounded(bytes)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Pages() { munmap(memory_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  void close() const { EXPECT_EQ(mprotect(memory_, bytes_, PROT_NONE), 0); }
  void open() const { EXPECT_EQ(mprotect(memory_, bytes_, PROT_READ | PROT_WRITE), 0); }

 private:
  static size_t rounded(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return std::max<size_t>(bytes + page - 1, page) / page * page;
  }
  void* memory_;
  size_t bytes_;
};

/// Holds a case's memory on a device, guard zones and all, and a workspace. While it is closed the host gets a fault
/// for a look at either: on a GPU by nature, in the emulator by the pages' protection.
template <class Case>
class Placed {
 public:
  Placed(const Gpu& gpu, const Case& problem, size_t workspace_bytes)
      : gpu_(gpu), buffers_(kit::buffers_of(problem)), workspace_bytes_(workspace_bytes) {
    for (const kit::Buffer* buffer : buffers_) total_ += rounded(buffer->with_guards().size());
    if (gpu.emulated()) {
      pages_ = std::make_unique<Pages>(total_ + workspace_bytes);
      memory_ = pages_->data();
    } else {
      Result<void*> memory = gpu.allocate(total_ + workspace_bytes);
      EXPECT_EQ(memory.status().message(), "");
      memory_ = static_cast<std::byte*>(*memory);
    }
    send();
    EXPECT_EQ(gpu.fill(workspace().data(), 0xFF, workspace_bytes, {}).message(), "");
  }
  ~Placed() {
    if (pages_ == nullptr) {
      EXPECT_EQ(gpu_.free(memory_).message(), "");
    }
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  std::span<std::byte> workspace() const { return {memory_ + total_, workspace_bytes_}; }
  void close() const {
    if (pages_ != nullptr) pages_->close();
  }
  void open() const {
    if (pages_ != nullptr) pages_->open();
  }
  /// Copies all of the case's memory to the device; `fetch` copies it back.
  void send() const {
    for_each([&](std::byte* there, std::span<std::byte> here) { copy(there, here.data(), here.size()); });
  }
  void fetch() const {
    EXPECT_EQ(gpu_.synchronize(Stream{}).message(), "");
    for_each([&](std::byte* there, std::span<std::byte> here) { copy(here.data(), there, here.size()); });
  }
  template <class Params>
  Params there(Params params) const {
    kit::for_each_tensor(params, [this](TensorView& view) {
      if (!view.given()) return;
      view.device = gpu_.device();
      for_each([&](std::byte* memory, std::span<std::byte> here) {
        auto* const data = static_cast<std::byte*>(view.data);
        if (data >= here.data() && data < here.data() + here.size()) view.data = memory + (data - here.data());
      });
    });
    return params;
  }

 private:
  static size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }
  template <class F>
  void for_each(const F& f) const {
    std::byte* at = memory_;
    for (const kit::Buffer* buffer : buffers_) {
      f(at, buffer->with_guards());
      at += rounded(buffer->with_guards().size());
    }
  }
  void copy(void* to, const void* from, size_t bytes) const { EXPECT_EQ(gpu_.copy(to, from, bytes).message(), ""); }

  const Gpu& gpu_;
  std::vector<const kit::Buffer*> buffers_;
  size_t total_ = 0, workspace_bytes_;
  std::unique_ptr<Pages> pages_;
  std::byte* memory_ = nullptr;
};

}  // namespace mla::test
