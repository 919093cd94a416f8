// The interfaces that torch requires of a device: the current device, streams, events, generators, pinned memory.
#pragma once
#include "memory.h"

namespace {

// --- devices, streams, events --------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return {kSim, (c10::DeviceIndex)current}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "invalid device ordinal ", (int)d.index());
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static Device whole(Device d) { return d.index() < 0 ? Device(kSim, current) : d; }
  static Stream make(Device d, int64_t id) { return Stream(Stream::UNSAFE, whole(d), id); }
  Stream getStream(Device d) const override { return make(d, current_streams[whole(d).index()]); }
  Stream getDefaultStream(Device d) const override { return make(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return make(d, ++last_stream); }
  Stream getNewStream(Device d, int = 0) const override { return make(d, ++last_stream); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void record(void** event, const Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!*event) *event = new Clock;
    *static_cast<Clock*>(*event) = clocks[actor(s)];
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (event) join(clocks[actor(s)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {  // work ends only when the host waits for it
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return !event || known(*static_cast<Clock*>(event));
  }
  bool queryStream(const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return known(clocks[actor(s)]);
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (event) join(clocks[kHost], *static_cast<Clock*>(event));
  }
  void synchronizeStream(const Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    wait(kHost, actor(s));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (auto& [who, clock] : std::map<Actor, Clock>(clocks)) if (who.first == d) wait(kHost, who);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const override {
    device_memory.recordStream(ptr, s);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

// --- generators ----------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  Generator(int index) : GeneratorImpl(c10::Device(kSim, index), kKey) {}
  static c10::DeviceType device_type() { return kSim; }
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    uint64_t words[] = {seed_, offset_};
    std::memcpy(state.data_ptr(), words, 16);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  at::Generator next() {  // a generator of the CPU for the numbers of one operator
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull + offset_ * 0xBF58476D1CE4E5B9ull + 1;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 29));
  }
};

const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(index < 0 ? current : index);
}

template <class Base>
struct HooksOf : Base {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({kSim, d}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice({kSim, d}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d = -1) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d = -1) const override {
    return at::make_generator<Generator>(d < 0 ? current : d);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto it = blocks.upper_bound((uintptr_t)data);
    TORCH_CHECK(it != blocks.begin(), "not memory of the device");
    return {kSim, (c10::DeviceIndex)(--it)->second.device};
  }
};

#if SIM_IS_CUDA
struct Hooks final : HooksOf<at::CUDAHooksInterface> {
  Hooks(at::CUDAHooksArgs = {}) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
};
#else
struct Hooks final : HooksOf<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto data = device_memory.allocate(n);
    std::memcpy(data.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(n);
  }
};
#endif

}  // namespace
