// A CUDA device in host memory, for the CPU build of torch; __init__.py says what it shows.
//
// Every device storage wraps a host storage (Block), so that a device tensor has a host tensor over the same
// memory at no cost. Operators of the CUDA key run the CPU's kernel on these; views and allocation are torch's.
// What the process should know is reported to a listener as (kind, text, bytes):
//   wait    the host waits for the device
//   copy    between host and device
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The CPU build has no accelerator. Autograd asks here, since this library is loaded before torch's.
namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}  // namespace at::accelerator

namespace {
using namespace at;
using Name = const std::string&;

// ---- what is reported ----

void (*listener)(const char*, const char*, int64_t) = nullptr;
std::atomic<int64_t> kernels{0};

void report(const char* kind, Name text, int64_t bytes = 0) {
  if (listener) listener(kind, text.c_str(), bytes);
}

// ---- devices and streams: every stream is the default one, and work has ended when it is issued ----

DeviceIndex device_count = 1;
thread_local DeviceIndex current = 0;

void make_current(DeviceIndex index) {
  TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal ", int(index));
  if (index >= 0) current = index;
}

DeviceIndex exchange(DeviceIndex index) {
  const DeviceIndex before = current;
  make_current(index);
  return before;
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device d) const override { return Device(kCUDA, exchange(d.index())); }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device d) const override { make_current(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index() < 0 ? current : d.index(); }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { report("wait", "event.synchronize"); }
  void synchronizeStream(const Stream&) const override { report("wait", "stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { report("wait", "synchronize"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- memory ----

std::atomic<int64_t> in_use{0}, peak{0};

struct Block {  // the owner of one piece of device memory
  Storage host;
  int64_t bytes;

  explicit Block(Storage memory) : host(std::move(memory)), bytes((host.nbytes() + 511) / 512 * 512) {
    const int64_t now = in_use += bytes;
    for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
  }
  static void release(void* block) {
    in_use -= static_cast<Block*>(block)->bytes;
    delete static_cast<Block*>(block);
  }
};

DataPtr device_memory(const Storage& host) {
  if (host.nbytes() == 0) return {nullptr, nullptr, &Block::release, Device(kCUDA, current)};
  auto* block = new Block(host);
  return {block->host.mutable_data(), block, &Block::release, Device(kCUDA, current)};
}

struct HostMemory : Allocator {
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct DeviceAllocator final : HostMemory {
  DataPtr allocate(size_t bytes) override {
    return device_memory(Storage(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), false));
  }
} device_allocator;

struct PinnedAllocator final : HostMemory {
  inline static std::mutex lock;
  inline static std::map<const char*, size_t> blocks;

  static void release(void* memory) {
    std::lock_guard held(lock);
    blocks.erase(static_cast<char*>(memory));
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  static bool holds(const void* address) {
    std::lock_guard held(lock);
    const auto* at = static_cast<const char*>(address);
    auto next = blocks.upper_bound(at);
    return next != blocks.begin() && at < std::prev(next)->first + std::prev(next)->second;
  }
  DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, Device(kCPU)};
    void* memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard held(lock);
    blocks[static_cast<char*>(memory)] = bytes;
    return {memory, memory, &release, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
} pinned_allocator;

}  // namespace

namespace at {  // torch looks for the class by this name
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { make_current(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::holds(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void deviceSynchronize(DeviceIndex) const override { report("wait", "synchronize"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {

// ---- tensors of the host over device memory, and back ----

Tensor tensor_over(Storage storage, const Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor on_host(const Tensor& tensor) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  Storage host = block ? block->host : Storage(Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), true);
  return tensor_over(std::move(host), tensor, DispatchKey::CPU);
}

// The tensors of one call of an operator: those of the device are lent to the CPU's kernel.
struct Call {
  std::string name;
  std::vector<std::pair<Tensor, Tensor>> lent;  // on the device, on the host
  std::vector<Tensor> host;
  std::optional<Device> asked;

  Tensor lend(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host.push_back(tensor);
      return tensor;
    }
    lent.emplace_back(tensor, on_host(tensor));
    return lent.back().second;
  }

  [[noreturn]] void refuse(const Tensor& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two: ", name, ": ",
                lent.front().first.device(), " and ", other.device(), ", ", other.dtype(), other.sizes());
  }

  // Memory that the kernel has given to an empty tensor becomes the device's.
  void adopt_resized() const {
    for (const auto& [original, alias] : lent) {
      if (alias.sizes() == original.sizes()) continue;
      auto *tensor = original.unsafeGetTensorImpl(), *resized = alias.unsafeGetTensorImpl();
      auto* storage = original.storage().unsafeGetStorageImpl();
      if (storage->nbytes() == 0) {
        storage->set_data_ptr_noswap(device_memory(alias.storage()));
        storage->set_nbytes(alias.storage().nbytes());
      }
      tensor->set_sizes_and_strides(resized->sizes(), resized->strides(), resized->storage_offset());
    }
  }

  Tensor returned(const Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, alias] : lent) {
      if (alias.is_same(tensor)) return original;
      if (alias.storage().is_alias_of(tensor.storage()))
        return tensor_over(original.storage(), tensor, DispatchKey::CUDA);
    }
    for (const Tensor& each : host)
      if (each.is_same(tensor)) return tensor;
    const c10::DeviceGuard guard(asked.value_or(lent.empty() ? Device(kCUDA) : lent[0].first.device()));
    const Storage& host = tensor.storage();
    Storage made(Storage::use_byte_size_t(), host.nbytes(), device_memory(host), &device_allocator, true);
    return tensor_over(std::move(made), tensor, DispatchKey::CUDA);
  }
};

template <typename Change>  // a function of Tensor
void change_tensors(IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    value = list;
  }
}

// ---- copies ----

// CUDA itself stages pageable memory while the host waits, also where torch asks it not to.
void report_copy(bool to_device, const Tensor& host, int64_t bytes, bool non_blocking) {
  const bool pinned = PinnedAllocator::holds(host.const_data_ptr());
  const std::string text = c10::str("to ", to_device ? "device" : "host", pinned ? " pinned" : " pageable",
                                    non_blocking ? "" : " blocking");
  report("copy", text, bytes);
  if (!pinned || !non_blocking) report("wait", "copy " + text);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (self.is_cuda() && source.is_cuda()) {
    ++kernels;
  } else {
    report_copy(self.is_cuda(), self.is_cuda() ? source : self, source.nbytes(), non_blocking);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  Tensor target = self.is_cuda() ? on_host(self) : self;
  target.copy_(source.is_cuda() ? on_host(source) : source);
  return self;
}

void foreach_copy_(TensorList self, TensorList source, bool non_blocking) {
  bool device = true;
  for (size_t i = 0; i < self.size(); ++i) device = device && self[i].is_cuda() && source[i].is_cuda();
  if (device) ++kernels;
  for (size_t i = 0; i < self.size(); ++i) {
    at::AutoDispatchBelowADInplaceOrView guard;
    if (device)
      on_host(self[i]).copy_(on_host(source[i]));
    else
      Tensor(self[i]).copy_(source[i], non_blocking);
  }
}

// ---- the checks of a GPU ----

bool begins(Name name, std::initializer_list<const char*> beginnings) {
  for (const char* each : beginnings)
    if (name.rfind(each, 0) == 0) return true;
  return false;
}

using Operator = c10::OperatorHandle;
using Stack = torch::jit::Stack;

void check_devices(const Operator& op, const Call& call, const Stack& stack, size_t first) {
  for (const auto& [tensor, alias] : call.lent)
    if (tensor.device() != call.lent[0].first.device()) call.refuse(tensor);
  const bool indexes = begins(call.name, {"aten::index.Tensor", "aten::_index_put_impl_"});
  const bool takes_numbers =
      op.hasTag(Tag::pointwise) || indexes ||
      begins(call.name, {"aten::fill_", "aten::masked_fill", "aten::_foreach_", "aten::_fused_adam",
                         "aten::floor_divide"});
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size() && !call.lent.empty(); ++i) {
    const IValue& value = stack[first + i];
    const auto* alias = arguments[i].alias_info();
    for (const Tensor& tensor : call.host) {
      const bool here = value.isTensor() && value.toTensor().is_same(tensor);
      if (here && alias && alias->isWrite()) call.refuse(tensor);
    }
    TORCH_CHECK(!value.isGenerator() || !value.toGenerator().device().is_cpu(),
                "Expected a 'cuda' device type for generator but found 'cpu' (", call.name, ")");
  }
  for (const Tensor& tensor : call.host)
    if (!call.lent.empty() && !indexes && (tensor.dim() || !takes_numbers)) call.refuse(tensor);
}

bool has_mask(const IValue& indices) {
  for (const std::optional<Tensor> index : indices.toOptionalTensorVector())
    if (index && index->defined() && isIntegralType(index->scalar_type(), true) && index->itemsize() == 1)
      return true;
  return false;
}

// Reports waits for what only the device knows, a shape or a number, and copies that CUDA's kernels make.
void report_waits(const Operator& op, const Call& call, const Stack& stack, size_t first) {
  if (begins(call.name, {"aten::index.Tensor"})) return;  // torch has copied indices, and searched masks
  if (begins(call.name, {"aten::_index_put_impl_", "aten::where"})) {
    const bool put = call.name == "aten::_index_put_impl_";
    const bool mask = put && has_mask(stack[first + 1]);
    if (mask && !call.host.empty() && stack[first + 2].toTensor().numel() == 1) return;  // a masked_fill
    for (const Tensor& tensor : call.host) report_copy(true, tensor, tensor.nbytes(), false);
    if (mask) report("wait", call.name);
  } else if (op.hasTag(Tag::data_dependent_output) || op.hasTag(Tag::dynamic_output_shape)) {
    report("wait", call.name);
  }
}

// ---- operators ----

void run_on_host(const Operator& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Call call;
  call.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  ++kernels;
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    change_tensors(value, [&](const Tensor& tensor) { return call.lend(tensor); });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      call.asked = value.toDevice();
      value = Device(kCPU);
    }
  }
  check_devices(op, call, *stack, first);
  report_waits(op, call, *stack, first);
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  call.adopt_resized();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    change_tensors((*stack)[i], [&](const Tensor& tensor) { return call.returned(tensor); });
}

using Dtype = std::optional<ScalarType>;

Tensor empty(IntArrayRef size, Dtype dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Scalar number(const Tensor& self) {
  report("wait", "item");
  at::AutoDispatchBelowADInplaceOrView guard;
  return on_host(self).item();
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

Tensor& set_to_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_to_whole_storage(Tensor& self, Storage source) { return at::native::set_(self, source); }

Tensor& set_to_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

// ---- attention: where the CPU has a fused kernel, so has the device ----

using Given = std::optional<Tensor>;

Given lent(const Given& tensor) { return tensor && tensor->is_cuda() ? Given(on_host(*tensor)) : tensor; }

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Given& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const int64_t choice = at::_fused_sdp_choice(
      on_host(query), on_host(key), on_host(value), lent(mask), dropout, causal, scale, grouped);
  const bool fused = choice == int64_t(SDPBackend::flash_attention);
  return int64_t(fused ? SDPBackend::overrideable : SDPBackend::math);
}

Tensor adopted(const Tensor& host) { return Call().returned(host); }

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Given& mask, double dropout,
    bool causal, bool, std::optional<double> scale) {
  ++kernels;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), dropout, causal, lent(mask), scale);
  const Tensor none = adopted(at::detail::empty_cpu({0}, kLong, {}, kCPU, {}, {}));
  return {adopted(out), adopted(sums), none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  ++kernels;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(query), on_host(key), on_host(value), on_host(out), on_host(sums), dropout,
      causal, mask.defined() ? lent(mask) : Given(), scale);
  return {adopted(dq), adopted(dk), adopted(dv), Tensor()};
}

Tensor histogram(const Tensor& self, int64_t bins, const Scalar& least, const Scalar& most) {
  ++kernels;  // the CPU has no kernel for whole numbers
  at::AutoDispatchBelowADInplaceOrView guard;
  return adopted(on_host(self).to(kFloat).histc(bins, least, most).to(self.scalar_type()));
}

at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> chooser(
    at::native::_fused_sdp_choice_stub, &choose_attention);

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  c10::SetAllocator(kCUDA, &device_allocator, 100);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // torch would compose these of others on a device without their kernels
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "addr.out", "all.dims",
                           "any.dims", "silu_backward", "mish_backward", "convolution",
                           "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_foreach_copy_", &foreach_copy_);
  library.impl("_local_scalar_dense", &number);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_to_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_to_storage);
  library.impl("set_.source_Tensor", &set_to_tensor);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("histc", &histogram);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

// host(tensor): the host's tensor over the memory of a device tensor
TORCH_LIBRARY(pretended_cuda, library) { library.def("host(Tensor(a) tensor) -> Tensor(a)", &on_host); }

EXPORTED void pretended_listen(void (*call)(const char*, const char*, int64_t)) { listener = call; }
EXPORTED void pretended_set_count(int count) { device_count = DeviceIndex(count); }
EXPORTED void pretended_set_device(int index) { make_current(DeviceIndex(index)); }
EXPORTED int pretended_device() { return current; }
EXPORTED int64_t pretended_kernels() { return kernels; }
EXPORTED int64_t pretended_in_use() { return in_use; }
EXPORTED int64_t pretended_peak() { return peak; }
EXPORTED void pretended_reset_peak() { peak = in_use.load(); }
