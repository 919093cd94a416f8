// Memory of the devices, pinned memory of the host, and the race detector.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <pybind11/stl.h>

namespace {

using at::Tensor;
constexpr auto kSim = c10::DeviceType::SIM_TYPE;
constexpr c10::DispatchKeySet kKey{c10::DispatchKey::SIM_TYPE};
constexpr int kDevices = 2;

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// --- streams: which steps happened before which --------------------------------------------------

// An actor is a stream, (device, id), or the host, (-1, 0). A clock counts the earlier steps of each actor.
using Actor = std::pair<int, int64_t>;
using Clock = std::map<Actor, uint64_t>;
const Actor kHost{-1, 0};

struct Access { Actor actor; uint64_t step; std::string op; };
struct Block {
  int device;  // -1: pinned memory of the host
  size_t nbytes;
  Actor home;
  std::set<Actor> recorded;
  std::optional<Access> write;
  std::vector<Access> reads;
};

std::recursive_mutex mutex;
std::map<Actor, Clock> clocks;
std::map<uintptr_t, Block> blocks;
std::vector<std::string> races;
size_t host_waits = 0;  // number of operators that made the host wait: `item`, copies to or from unpinned memory
size_t bytes_now[kDevices], bytes_peak[kDevices];
thread_local int current = 0;
thread_local int64_t current_streams[kDevices] = {};
std::atomic<int64_t> last_stream{0};

void join(Clock& into, const Clock& from) {
  for (auto& [actor, step] : from) into[actor] = std::max(into[actor], step);
}
Actor actor(const c10::Stream& s) { return {s.device_index(), s.id()}; }
Actor current_actor(int device) { return {device, current_streams[device]}; }
std::string name(const Actor& a) {
  return a == kHost ? "the host" : "stream " + std::to_string(a.second) + " of device " + std::to_string(a.first);
}
bool before(const Access& a, const Clock& clock) {
  auto found = clock.find(a.actor);
  return found != clock.end() && found->second >= a.step;
}
bool known(const Clock& clock) {
  auto& host = clocks[kHost];
  for (auto& [actor, step] : clock) if (host[actor] < step) return false;
  return true;
}
void wait(const Actor& waiter, const Actor& other) { join(clocks[waiter], clocks[other]); }

// One step of a stream: an operator that reads and writes memory.
struct Step {
  Actor who; uint64_t step; std::string op;
  Step(Actor who, std::string op) : who(who), op(std::move(op)) {
    wait(who, kHost);  // the step comes after all earlier work of the host
    step = ++clocks[who][who];
  }
  void touch(const void* data, bool writes) {
    auto it = blocks.upper_bound((uintptr_t)data);
    if (it == blocks.begin()) return;
    auto& block = (--it)->second;
    if ((uintptr_t)data >= it->first + std::max<size_t>(block.nbytes, 1)) return;
    auto check = [&](const Access& past, const char* what) {
      if (!before(past, clocks[who]))
        races.push_back(op + " on " + name(who) + what + past.op + " on " + name(past.actor) + " has ended");
    };
    if (block.write) check(*block.write, writes ? " writes before " : " reads before ");
    if (writes) {
      for (auto& read : block.reads) check(read, " writes before ");
      block.write = Access{who, step, op};
      block.reads.clear();
    } else {
      block.reads.push_back(Access{who, step, op});
    }
  }
  void touch(const Tensor& t, bool writes) {
    if (t.defined() && t.has_storage() && t.storage().nbytes()) touch(t.storage().data(), writes);
  }
};

// --- memory --------------------------------------------------------------------------------------

void* allocate_block(int device, size_t nbytes, Actor home) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(nbytes, 1));
  blocks[(uintptr_t)data] = Block{device, nbytes, home};
  if (device >= 0) {
    bytes_now[device] += nbytes;
    bytes_peak[device] = std::max(bytes_peak[device], bytes_now[device]);
  }
  return data;
}

// The home stream may reuse freed memory at once. So accesses by another stream must have ended before, or that stream
// must have been recorded by `record_stream`.
void free_block(void* data) {
  if (!data) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = blocks.find((uintptr_t)data);
  auto& block = found->second;
  if (block.device >= 0) {
    bytes_now[block.device] -= block.nbytes;
    auto accesses = block.reads;
    if (block.write) accesses.push_back(*block.write);
    auto& clock = clocks[block.home];
    for (auto& a : accesses)
      if (a.actor != block.home && a.actor != kHost && !block.recorded.count(a.actor) && !before(a, clock) &&
          !before(a, clocks[kHost]))
        races.push_back("memory of " + name(block.home) + " is free before " + a.op + " on " + name(a.actor) +
                        " has ended");
  }
  blocks.erase(found);
  c10::GetCPUAllocator()->raw_deallocate(data);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = allocate_block(current, n, current_actor(current));
    return {data, data, &free_block, c10::Device(kSim, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = blocks.find((uintptr_t)ptr.get());
    if (found != blocks.end()) found->second.recorded.insert(actor(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* sum : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*sum)[0].current = bytes_now[d];
      (*sum)[0].peak = bytes_peak[d];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override { bytes_peak[d] = bytes_now[d]; }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = allocate_block(-1, n, kHost);
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = blocks.upper_bound((uintptr_t)data);
  if (it == blocks.begin()) return false;
  auto& [start, block] = *--it;
  return block.device < 0 && (uintptr_t)data < start + std::max<size_t>(block.nbytes, 1);
}

}  // namespace
