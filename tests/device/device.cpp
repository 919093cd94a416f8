// Operators of the simulated device, and their registration with torch.
#include "runtime.h"

namespace {

// --- operators -----------------------------------------------------------------------------------

// The same memory as a tensor of the CPU. A storage without memory becomes resizable.
Tensor on_cpu(const Tensor& t) {
  auto& storage = t.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::kCPU);
  c10::Storage cpu = storage.nbytes() ? c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data))
                                      : c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), true);
  c10::DispatchKeySet key(c10::DispatchKey::CPU);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), key, t.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return result;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, kKey, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKey, c10::dtype_or_default(dtype));
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  c10::OptionalDeviceGuard guard(self.device());
  size_t nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    auto data = device_memory.allocate(nbytes);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(data));
    self.storage().set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage_at(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}
Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {n}, {});
}
Tensor& set_nothing(Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true));
}

Tensor& copy_(Tensor& dst, const Tensor& src, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  int device = (on_device(src) ? src : dst).device().index();
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Actor stream = current_actor(device);
    bool peers = on_device(src) && on_device(dst) && src.device() != dst.device();
    if (peers) wait(stream, current_actor(dst.device().index()));
    Step step(stream, "copy_");
    step.touch(src, false), step.touch(dst, true);
    if (peers) wait(current_actor(dst.device().index()), stream);
    bool host = !on_device(src) || !on_device(dst);
    const Tensor& there = on_device(src) ? dst : src;
    if (host && !(non_blocking && is_pinned(there.storage().data()))) { wait(kHost, stream); host_waits++; }
  }
  Tensor to = on_device(dst) ? on_cpu(dst) : dst;
  to.copy_(on_device(src) ? on_cpu(src) : src);
  return dst;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor to = dst;
  copy_(to, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Step(current_actor(self.device().index()), "item").touch(self, false);
    wait(kHost, current_actor(self.device().index()));
    host_waits++;
  }
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}
void record_stream(Tensor& self, c10::Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

// The CPU's operator for one that exists only for out-of-tree backends.
c10::OperatorHandle kernel_of(const c10::OperatorHandle& op) {
  static const std::string overrideable = "_overrideable";
  auto name = op.schema().name();
  auto at = name.find(overrideable);
  return at == std::string::npos ? op : c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, at).c_str(), "");
}

// All other operators: the CPU's kernel, on the same memory.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<c10::IValue> arguments(stack->begin() + first, stack->end());
  std::optional<c10::Device> device;
  struct Operand { Tensor ours, cpu; bool writes; };
  std::vector<Operand> operands;
  const bool indexes = schema.name().find("index") != std::string::npos;
  auto translate = [&](const Tensor& t, bool writes) -> Tensor {
    if (!on_device(t)) {
      TORCH_CHECK(!t.defined() || t.dim() == 0 || indexes, "Expected all tensors to be on the same device, but ",
                  schema.name(), " got one on ", t.device());
      return t;
    }
    TORCH_CHECK(!device || *device == t.device() || t.dim() == 0, "Expected all tensors to be on the same device, but ",
                schema.name(), " found ", *device, " and ", t.device());
    if (!device) device = t.device();
    operands.push_back({t, on_cpu(t), writes});
    return operands.back().cpu;
  };
  std::optional<at::Generator> generator;
  int where = -1;
  for (size_t i = 0; i < n; i++) {
    auto& argument = schema.arguments()[i];
    auto& value = arguments[i];
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (argument.type()->str().find("Generator") != std::string::npos) where = i;
    c10::IValue now = value;
    if (value.isTensor()) now = translate(value.toTensor(), writes);
    else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(translate(t, writes));
      now = c10::IValue(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        all.push_back(t ? std::optional<Tensor>(translate(*t, writes)) : t);
      now = c10::IValue(all);
    } else if (value.isDevice()) {
      if (!device) device = Guard::whole(value.toDevice());
      now = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
    }
    (*stack)[first + i] = now;
  }
  TORCH_CHECK(device, schema.name(), " has no argument that determines its device");
  c10::OptionalDeviceGuard guard(*device);
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Step step(current_actor(device->index()), schema.name());
    for (auto& each : operands) step.touch(each.ours, each.writes);
  }
  Tensor host_state;
  auto host = at::detail::getDefaultCPUGenerator();
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Generator ours = generator ? *generator : default_generator(device->index());
    TORCH_CHECK(ours.device().type() == kSim, "Expected a '", c10::Device(kSim).str(),
                "' device type for generator but found '", ours.device().type(), "'");
    auto drawn = static_cast<Generator*>(ours.unsafeGetGeneratorImpl())->next();
    if (where >= 0) (*stack)[first + where] = drawn;
    else { host_state = host.get_state(); host.set_state(drawn.get_state()); }
  }
  if (schema.name() == "aten::convolution_backward_overrideable") {  // as convolution_backward, without bias_sizes
    auto weight = arguments[2].toTensor().sizes();
    std::vector<int64_t> bias{arguments[6].toBool() ? weight[1] * arguments[8].toInt() : weight[0]};
    stack->insert(stack->begin() + first + 3, c10::IValue(bias));
  }
  kernel_of(op).redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (host_state.defined()) host.set_state(host_state);
  for (auto& each : operands)  // operands that got memory, or another shape
    if (each.writes && (each.cpu.sizes() != each.ours.sizes() || !each.ours.storage().nbytes()) && each.cpu.numel()) {
      each.ours.resize_(each.cpu.sizes());
      on_cpu(each.ours).copy_(each.cpu);
    }
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    for (auto& each : operands) if (each.cpu.is_same(t)) return each.ours;
    for (auto& each : operands)
      if (t.has_storage() && t.storage().nbytes() && t.storage().data() == each.ours.storage().data())
        return at::native::as_strided_tensorimpl(each.ours, t.sizes(), t.strides(), t.storage_offset());
    auto result = at::empty_strided(t.sizes(), t.strides(), t.options().device(*device));
    on_cpu(result).copy_(t);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    Step(current_actor(device->index()), schema.name()).touch(result, true);
    return result;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = back(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(back(t));
      value = c10::IValue(all);
    }
  }
}

// Draws other numbers than `bernoulli_`, as CUDA's kernel does.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor kept = at::rand_like(x) >= p;
  return {x.mul(kept).mul_(p == 1 ? 0. : 1. / (1. - p)), kept};
}

void own_operators(torch::Library& m) {
  m.impl("native_dropout", native_dropout);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_", set_nothing);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
#if !SIM_IS_CUDA
  for (auto name : {"convolution_overrideable", "convolution_backward_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
#endif
}

TORCH_LIBRARY_IMPL(_, SIM_TYPE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, SIM_TYPE, m) { own_operators(m); }
C10_REGISTER_GUARD_IMPL(SIM_TYPE, Guard)
REGISTER_ALLOCATOR(kSim, &device_memory)

#if SIM_IS_CUDA
// torch created its hooks object when it was imported, and never replaces it. The object has no members, so copying
// our vtable pointer into it makes it ours.
const bool hooked = [] {
  static Hooks ours;
  static_assert(sizeof(at::CUDAHooksInterface) == sizeof(void*) && sizeof(Hooks) == sizeof(void*));
  std::memcpy((void*)&at::detail::getCUDAHooks(), (void*)&ours, sizeof(void*));
  return true;
}();
#else
Hooks* hooks = [] { auto* h = new Hooks; at::RegisterPrivateUse1HooksInterface(h); return h; }();

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}
#endif

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("default_generator", [](int i) { return default_generator(i); });
  m.def("bytes_now", [](int d) { return bytes_now[d]; });
  m.def("bytes_peak", [](int d) { return bytes_peak[d]; });
  m.def("reset_peak", [](int d) { bytes_peak[d] = bytes_now[d]; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int d) { Guard().setDevice({kSim, (c10::DeviceIndex)d}); });
  m.def("busy", [] { std::lock_guard<std::recursive_mutex> lock(mutex); Step(current_actor(current), "sleep"); });
  m.def("host_waits", [] { return host_waits; });
  m.def("races", [] { std::lock_guard<std::recursive_mutex> lock(mutex); auto r = races; races.clear(); return r; });
}