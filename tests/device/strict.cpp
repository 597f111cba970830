// "strict": a second device type on the host's memory that behaves like an accelerator (PyTorch's PrivateUse1 key).
//
// A tensor's data_ptr lies in pages without access rights: whoever reads it on the host gets SIGSEGV. Its bytes are at
// address + shift, which operators get as CPU tensors (no copy), after a check of devices. Asynchronous copies run as late
// as the stream rules allow. A vector clock for each stream finds what two streams do to one block without an order.
// Each stream also has a time at which its work would end on a device (STRICT_OP_US): waiting for it takes that long.
#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/alias_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

constexpr auto STRICT = c10::DeviceType::PrivateUse1;
using at::Tensor;
using c10::IValue;

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}
const int DEVICES = setting("STRICT_DEVICES", 2);
std::atomic<bool> hidden{false};  // as if the machine had none
int count() { return hidden ? 0 : DEVICES; }
const size_t MEMORY = size_t(setting("STRICT_MEMORY_MIB", 8192)) << 20;  // of each device and process; touched pages alone cost
const bool POISON = setting("STRICT_POISON", 1);  // fresh memory is 0xff: NaN, -1
const bool LAZY = setting("STRICT_LAZY", 1);      // asynchronous copies run as late as allowed
const bool RACES = setting("STRICT_RACES", 1);    // streams are checked for order
std::atomic<int64_t> op_us{setting("STRICT_OP_US", 0)};  // seconds that each operator keeps its stream busy, as seen by events and waits

// ---- context: a forked child of a process that has used the device cannot use it --------------------------------------
std::atomic<bool> used{false}, bad_fork{false};
thread_local int current_device = 0;

void use() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize strict in forked subprocess. Use the 'spawn' start method.");
  if (!used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
}

// ---- streams: queues of postponed copies, and clocks ----------------------------------------------------------------
using Clock = std::map<int64_t, uint64_t>;  // stream -> its time
using Time = std::chrono::steady_clock::time_point;
void join(Clock& mine, const Clock& other) {
  for (auto& [s, t] : other) mine[s] = std::max(mine[s], t);
}
struct StreamState {
  std::deque<std::function<void()>> todo;
  uint64_t done = 0;  // of all ever queued
  Clock clock;
  Time busy;  // when its work would end on a device
};
struct EventState {
  int64_t stream = 0;
  uint64_t position = 0;
  Clock clock;
  Time time;
};
std::recursive_mutex big;  // queues, clocks, blocks
std::map<int64_t, StreamState> streams;  // key: device * 1000 + stream id
Clock host_clock;                        // what the host has waited for
std::atomic<int64_t> next_stream{1};
thread_local std::map<int, int64_t> current_streams;
std::vector<std::string> complaints;

int64_t key(const c10::Stream& s) { return s.device_index() * 1000 + s.id(); }
int64_t current_key(int device) { return device * 1000 + current_streams[device]; }
std::string name(int64_t key) { return "stream " + std::to_string(key % 1000) + " of strict:" + std::to_string(key / 1000); }

void complain(const std::string& what) {
  std::cerr << "strict: " << what << std::endl;
  complaints.push_back(what);
}
void raise_complaints() {
  if (complaints.empty()) return;
  std::string all = "strict: ";
  for (auto& c : complaints) all += c + "; ";
  complaints.clear();
  TORCH_CHECK(false, all);
}
void run_until(int64_t stream, uint64_t position) {
  auto& state = streams[stream];
  while (state.done < position && !state.todo.empty()) {
    auto next = std::move(state.todo.front());
    state.todo.pop_front();
    ++state.done;
    next();
  }
}
void run_all(int64_t stream) { run_until(stream, UINT64_MAX); }
uint64_t tick(int64_t stream) {  // a new piece of work begins on it, after all that the host waited for
  auto& clock = streams[stream].clock;
  join(clock, host_clock);
  return ++clock[stream];
}
Time busy(int64_t stream) { return std::max(streams[stream].busy, std::chrono::steady_clock::now()); }
void work(int64_t stream) {  // an operator's time on the device
  if (op_us > 0) streams[stream].busy = busy(stream) + std::chrono::microseconds(op_us);
}
void wait_until(Time time) {  // the host waits; the others' work goes on
  if (op_us > 0) std::this_thread::sleep_until(time);
}
bool before(int64_t stream, uint64_t time, const Clock& clock) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

// ---- memory -----------------------------------------------------------------------------------------------------------
struct Uses {
  std::pair<int64_t, uint64_t> write{-1, 0};
  Clock reads;
  void add(const Uses& other) {  // of memory that may be the same
    for (auto& [s, t] : other.reads) reads[s] = std::max(reads[s], t);
    if (other.write.first >= 0) reads[other.write.first] = std::max(reads[other.write.first], other.write.second);
  }
};
struct Block {
  size_t size;
  int64_t owner;  // the stream that was current when it was allocated
  Uses uses;
  Uses earlier;  // of memory that a caching allocator, which keeps a pool for each stream, might have given again
  std::set<int64_t> recorded;
};
struct Ghost {
  size_t size;
  Uses uses;
};
struct Arena {
  char *device, *host;
  ptrdiff_t shift;
  std::vector<std::map<char*, size_t>> free;
  std::map<char*, Block> blocks;
  std::vector<size_t> now, peak;
  std::map<int64_t, std::vector<Ghost>> ghosts;  // freed memory by its owner
  Arena() : free(DEVICES), now(DEVICES), peak(DEVICES) {
    const size_t all = MEMORY * DEVICES;
    device = (char*)mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    host = (char*)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "strict: no address space");
    shift = host - device;
    for (int d = 0; d < DEVICES; ++d) free[d][device + d * MEMORY] = MEMORY;
  }
  bool has(const void* p) const { return p >= device && p < device + MEMORY * DEVICES; }
  bool has_host(const void* p) const { return p >= host && p < host + MEMORY * DEVICES; }
};
Arena& arena() {
  static Arena* it = new Arena;
  return *it;
}
Block* block_of(const void* p) {
  auto& a = arena();
  if (!a.has(p)) return nullptr;
  auto found = a.blocks.upper_bound((char*)p);
  if (found == a.blocks.begin()) return nullptr;
  --found;
  return (char*)p < found->first + found->second.size ? &found->second : nullptr;
}
void check_reads(const std::string& op, const char* how, int64_t stream, const Clock& clock, const Clock& reads) {
  for (auto& [s, t] : reads)
    if (s != stream && !before(s, t, clock)) complain(op + " on " + name(stream) + how + name(s) + " uses, without waiting for it");
}
void touch(const void* p, int64_t stream, bool writes, const std::string& op) {
  if (!RACES) return;
  Block* b = block_of(p);
  if (!b) return;
  auto& clock = streams[stream].clock;
  if (!b->earlier.reads.empty()) {
    check_reads(op, " uses memory that was freed (no record_stream), given again, and that ", stream, clock, b->earlier.reads);
    b->earlier.reads.clear();
  }
  Uses& uses = b->uses;
  if (uses.write.first >= 0 && uses.write.first != stream && !before(uses.write.first, uses.write.second, clock))
    complain(op + " on " + name(stream) + " uses what " + name(uses.write.first) + " writes, without waiting for it");
  if (writes) {
    check_reads(op, " writes what ", stream, clock, uses.reads);
    uses.write = {stream, clock[stream]};
    uses.reads.clear();
  } else {
    uses.reads[stream] = clock[stream];
  }
}
void give_back(char* p) {
  auto& a = arena();
  auto it = a.blocks.find(p);
  const size_t size = it->second.size;
  auto& pool = a.free[(p - a.device) / MEMORY];
  if (size >= (1 << 20)) madvise(p + a.shift, size, MADV_DONTNEED);
  auto place = pool.emplace(p, size).first;
  a.blocks.erase(it);
  if (auto next = std::next(place); next != pool.end() && place->first + place->second == next->first) {
    place->second += next->second;
    pool.erase(next);
  }
  if (place != pool.begin())
    if (auto prior = std::prev(place); prior->first + prior->second == place->first) {
      prior->second += place->second;
      pool.erase(place);
    }
}
void release(void* address) {
  if (!address || bad_fork) return;
  char* p = (char*)address;
  std::lock_guard<std::recursive_mutex> lock(big);
  auto& a = arena();
  auto it = a.blocks.find(p);
  if (it == a.blocks.end()) return;
  const Block& b = it->second;
  a.now[(p - a.device) / MEMORY] -= b.size;
  std::set<int64_t> users = b.recorded;
  for (auto& [s, t] : b.uses.reads) users.insert(s);
  if (b.uses.write.first >= 0) users.insert(b.uses.write.first);
  if (RACES && b.recorded.empty()) {
    Uses late;
    late.add(b.uses);
    auto& ghosts = a.ghosts[b.owner];
    if (!late.reads.empty()) ghosts.push_back({b.size, late});
    if (ghosts.size() > 64) ghosts.erase(ghosts.begin());
  }
  users.erase(b.owner);
  std::vector<std::pair<int64_t, uint64_t>> until;
  for (auto s : users)
    if (!streams[s].todo.empty()) until.emplace_back(s, streams[s].done + streams[s].todo.size());
  auto& owner = streams[b.owner];
  if (until.empty() && owner.todo.empty()) return give_back(p);
  owner.todo.push_back([p, until] {  // its memory stays until those streams are done
    for (auto& [s, position] : until) run_until(s, position);
    give_back(p);
  });
}
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    const int d = current_device;
    if (!bytes) return {nullptr, nullptr, &release, c10::Device(STRICT, d)};
    const size_t size = (bytes + 511) / 512 * 512;
    std::lock_guard<std::recursive_mutex> lock(big);
    auto& a = arena();
    auto fits = a.free[d].begin();
    while (fits != a.free[d].end() && fits->second < size) ++fits;
    if (fits == a.free[d].end()) {  // what waits to be given back
      for (auto& [k, state] : streams) run_all(k);
      for (fits = a.free[d].begin(); fits != a.free[d].end() && fits->second < size;) ++fits;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, fits != a.free[d].end(), "strict out of memory. Tried to allocate ", bytes, " bytes on strict:",
                     d, ", which has ", MEMORY, ", ", a.now[d], " in use.");
    char* p = fits->first;
    const size_t rest = fits->second - size;
    a.free[d].erase(fits);
    if (rest) a.free[d][p + size] = rest;
    Block& block = a.blocks[p] = Block{size, current_key(d)};
    if (RACES) {
      auto& ghosts = a.ghosts[block.owner];
      std::erase_if(ghosts, [&](const Ghost& g) {  // the host has waited for all of it
        for (auto& [s, t] : g.uses.reads)
          if (!before(s, t, host_clock)) return false;
        return true;
      });
      for (auto& g : ghosts)
        if (g.size >= size) block.earlier.add(g.uses);
    }
    a.now[d] += size;
    a.peak[d] = std::max(a.peak[d], a.now[d]);
    if (POISON) std::memset(p + a.shift, 0xff, size);
    return {p, p, &release, c10::Device(STRICT, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    std::memcpy((char*)to + arena().shift, (const char*)from + arena().shift, n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    std::lock_guard<std::recursive_mutex> lock(big);
    if (Block* b = block_of(p.get())) b->recorded.insert(key(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes})
      (*array)[0].current = arena().now[d], (*array)[0].peak = arena().peak[d];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override { arena().peak[d] = arena().now[d]; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override { return {MEMORY - arena().now[d], MEMORY}; }
};
Allocator allocator;
REGISTER_ALLOCATOR(STRICT, &allocator)

// Pinned memory: ordinary memory that is known to be pinned.
std::map<char*, size_t> pinned;
void unpin(void* p) {
  std::lock_guard<std::recursive_mutex> lock(big);
  pinned.erase((char*)p);
  std::free(p);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    void* p = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::recursive_mutex> lock(big);
    pinned[(char*)p] = bytes;
    if (POISON) std::memset(p, 0xff, bytes);
    return {p, p, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_allocator;
bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(big);
  auto found = pinned.upper_bound((char*)p);
  if (found == pinned.begin()) return false;
  --found;
  return (char*)p < found->first + std::max<size_t>(found->second, 1);
}

// ---- guard ------------------------------------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return STRICT; }
  c10::Device getDevice() const override { return {STRICT, (c10::DeviceIndex)current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < DEVICES, "strict: invalid device ordinal ", (int)d.index());
    use();
    current_device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    if (d.index() >= 0 && d.index() != old.index()) setDevice(d);
    return old;
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return bad_fork ? 0 : count(); }
  static int at(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  c10::Stream make(c10::Device d, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(STRICT, at(d)), id);
  }
  c10::Stream getStream(c10::Device d) const override { return make(d, current_streams[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return make(d, next_stream++ % 32 + 1); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return (void*)(key(s)); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (EventState*)e; }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    if (!*e) *e = new EventState;
    auto& state = streams[key(s)];
    tick(key(s));
    *(EventState*)*e = {key(s), state.done + state.todo.size(), state.clock, busy(key(s))};
  }
  void block(void* e, const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    const EventState event = *(EventState*)e;
    auto& state = streams[key(s)];
    join(state.clock, event.clock);
    state.busy = std::max(state.busy, event.time);
    state.todo.push_back([event] { run_until(event.stream, event.position); });
  }
  bool queryEvent(void* e) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    auto& event = *(EventState*)e;
    const bool ready = streams[event.stream].done >= event.position && event.time <= std::chrono::steady_clock::now();
    if (ready) join(host_clock, event.clock);
    else run_until(event.stream, event.position);  // a loop that asks must end
    raise_complaints();
    return ready;
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    const bool ready = streams[key(s)].todo.empty();
    run_all(key(s));
    return ready;
  }
  void synchronizeEvent(void* e) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    auto& event = *(EventState*)e;
    run_until(event.stream, event.position);
    wait_until(event.time);
    join(host_clock, event.clock);
    raise_complaints();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(big);
    run_all(key(s));
    wait_until(busy(key(s)));
    tick(key(s));
    join(host_clock, streams[key(s)].clock);
    raise_complaints();
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    use();
    std::lock_guard<std::recursive_mutex> lock(big);
    for (auto& [k, state] : streams)
      if (k / 1000 == d) run_all(k), wait_until(busy(k)), tick(k), join(host_clock, state.clock);
    raise_complaints();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { allocator.recordStream(p, s); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((EventState*)b)->time - ((EventState*)a)->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- generators: the device's random numbers are not the CPU's of the same seed -----------------------------------------
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  uint64_t seed_ = c10::default_rng_seed_val;
  explicit Generator(c10::DeviceIndex d)
      : GeneratorImpl({STRICT, d}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(at::detail::createCPUGenerator()) {
    set_current_seed(seed_);
  }
  void set_current_seed(uint64_t seed) override { seed_ = seed, cpu.set_current_seed(seed ^ 0x5a5a5a5aULL); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { const_cast<at::Generator&>(cpu).unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->cpu = cpu.clone();
    return copy;
  }
};
const at::Generator& default_generator(c10::DeviceIndex d) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (int i = 0; i < DEVICES; ++i) v->push_back(at::make_generator<Generator>(i));
    return v;
  }();
  return all->at(d < 0 ? current_device : d);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return used && !bad_fork; }
  c10::DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({STRICT, d}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return Guard().exchangeDevice({STRICT, d}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(arena().has(p), "strict: not an address of a device");
    return {STRICT, (c10::DeviceIndex)(((char*)p - arena().device) / MEMORY)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current_device : d); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    const at::DeviceGuard guard(s.device());
    auto fresh = allocator.allocate(n);
    auto old = s.nbytes();
    if (auto least = std::min(n, old)) std::memcpy((char*)fresh.get() + arena().shift, (char*)s.data() + arena().shift, least);
    s.set_data_ptr_noswap(std::move(fresh));
    s.set_nbytes(n);
  }
} hooks;

// ---- tensors: as the operators of the CPU see them, and back --------------------------------------------------------------
bool ours(const Tensor& t) { return t.defined() && t.device().type() == STRICT; }

Tensor as_cpu(const Tensor& t, bool owning = true) {
  auto* held = owning ? new c10::Storage(t.storage()) : nullptr;
  char* data = (char*)t.storage().data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(data ? data + arena().shift : nullptr, held, [](void* p) { delete (c10::Storage*)p; }, c10::kCPU),
                       c10::GetCPUAllocator(), true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  Tensor result(std::move(impl));
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}
Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const at::DeviceGuard guard(device.value_or(at::Device(STRICT)));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const at::DeviceGuard guard(device.value_or(at::Device(STRICT)));
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}
Tensor as_device(const Tensor& t, c10::Device device) {
  if (!t.defined() || t.device().type() == STRICT) return t;
  auto result = empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, device, std::nullopt);
  const auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
  if (bytes && t.numel()) std::memcpy((char*)result.storage().data() + arena().shift, t.const_data_ptr(), bytes);
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  if (result.numel()) touch(result.storage().data(), current_key(device.index()), true, "result");
  return result;
}

// ---- every operator -----------------------------------------------------------------------------------------------------
std::map<std::string, uint64_t> calls;
const std::set<std::string> no_scalars{"aten::cat", "aten::mm", "aten::bmm", "aten::addmm", "aten::embedding", "aten::gather",
                                       "aten::scatter", "aten::index_select", "aten::convolution_overrideable"};
const std::set<std::string> cpu_indices{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

void write_log() {  // STRICT_LOG=directory: how often each process called each operator (every 1000 calls), and its peaks of memory
  static const char* where = std::getenv("STRICT_LOG");
  static uint64_t total = 0;
  if (!where || ++total % 1000) return;
  std::ofstream out(std::string(where) + "/" + std::to_string(getpid()) + ".txt");
  out << "calls " << total << " peak bytes";
  for (auto peak : arena().peak) out << " " << peak;
  for (auto& [op, n] : calls) out << "\n" << n << " " << op;
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const size_t count = formal.size(), begin = stack->size() - count;
  const std::string& called = schema.name();
  std::optional<c10::Device> device, cpu;
  auto see = [&](const Tensor& t, size_t index) {
    if (!t.defined()) return;
    if (t.device().type() == STRICT) {
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *device, " and ", t.device(), "! (", called, ")");
      device = t.device();
    } else if (!(t.dim() == 0 && !no_scalars.count(called)) && !(index > 0 && cpu_indices.count(called) && formal[index].name() == "indices")) {
      cpu = t.device();
    }
  };
  auto each = [&](const IValue& v, size_t index, auto&& f) {
    if (v.isTensor()) f(v.toTensor(), index);
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) f(t, index);
    else if (v.isOptionalTensorList()) for (const auto& t : v.toOptionalTensorVector()) if (t) f(*t, index);
  };
  std::vector<IValue> before(stack->begin() + begin, stack->end());
  for (size_t i = 0; i < count; ++i) {
    each(before[i], i, see);
    if (before[i].isDevice() && before[i].toDevice().type() == STRICT && !device) device = before[i].toDevice();
  }
  TORCH_CHECK(device, "strict: no device in ", called);
  TORCH_CHECK(!cpu, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", *cpu, "! (",
              called, ")");
  if (!device->has_index()) device = c10::Device(STRICT, current_device);
  const int64_t stream = current_key(device->index());
  {
    std::lock_guard<std::recursive_mutex> lock(big);
    use();
    ++calls[called];
    write_log();
    run_all(stream);
    tick(stream);
    work(stream);
    for (size_t i = 0; i < count; ++i)
      each(before[i], i, [&](const Tensor& t, size_t index) {
        if (ours(t) && t.numel()) touch(t.storage().data(), stream, formal[index].alias_info() && formal[index].alias_info()->isWrite(), called);
      });
    raise_complaints();
  }
  std::vector<std::pair<Tensor, Tensor>> written;
  auto convert = [&](const Tensor& t, size_t i) {
    if (!ours(t)) return t;
    Tensor c = as_cpu(t);
    if (formal[i].alias_info() && formal[i].alias_info()->isWrite()) written.emplace_back(t, c);
    return c;
  };
  for (size_t i = 0; i < count; ++i) {
    IValue& v = (*stack)[begin + i];
    if (v.isTensor()) v = convert(v.toTensor(), i);
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : before[i].toTensorVector()) list.push_back(convert(t, i));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : before[i].toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(convert(*t, i)) : std::nullopt);
      v = list;
    } else if (v.isDevice()) {
      v = c10::Device(c10::kCPU);
    } else if (formal[i].name() == "generator" || v.isGenerator()) {
      const at::Generator& g = v.isGenerator() ? v.toGenerator() : default_generator(device->index());
      TORCH_CHECK(g.device().type() == STRICT, "Expected a 'strict' device type for generator but found '", g.device().type(), "'");
      v = static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [t, c] : written) {  // out= tensors that were resized
    if (c.sizes() == t.sizes() && c.strides() == t.strides() && arena().has_host(c.storage().data())) continue;
    t.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides(), 0);
    const auto bytes = at::detail::computeStorageNbytes(c.sizes(), c.strides(), c.element_size());
    if (bytes > t.storage().nbytes()) hooks.resizePrivateUse1Bytes(t.storage(), bytes);
    if (bytes && (char*)t.storage().data() + arena().shift != c.const_data_ptr()) std::memmove((char*)t.storage().data() + arena().shift, c.const_data_ptr(), bytes);
  }
  const auto& returned = schema.returns();
  const size_t base = stack->size() - returned.size();
  for (size_t r = 0; r < returned.size(); ++r) {
    IValue& v = (*stack)[base + r];
    const auto* alias = returned[r].alias_info();
    if (alias) {
      bool found = false;
      for (size_t i = 0; i < count && !found; ++i)
        if (formal[i].alias_info() && *formal[i].alias_info() == *alias) v = before[i], found = true;
      TORCH_CHECK(found && alias->isWrite(), "strict: no kernel for the view ", called);
    } else if (v.isTensor()) {
      v = as_device(v.toTensor(), *device);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(as_device(t, *device));
      v = list;
    }
  }
}

// ---- copies ---------------------------------------------------------------------------------------------------------------
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto device = ours(to) ? to.device() : from.device();
  const int64_t stream = current_key(device.index());
  std::lock_guard<std::recursive_mutex> lock(big);
  use();
  ++calls["aten::copy_"];
  tick(stream);
  work(stream);
  if (ours(from) && from.numel()) touch(from.storage().data(), stream, false, "copy");
  if (ours(to) && to.numel()) touch(to.storage().data(), stream, true, "copy");
  const bool crosses = ours(from) != ours(to);
  const Tensor& host = ours(from) ? to : from;
  if (crosses && from.scalar_type() != to.scalar_type()) ++calls["copy across that casts"];
  const bool late = LAZY && non_blocking && crosses && is_pinned(host.storage().data());
  Tensor source = ours(from) ? as_cpu(from, !late) : from, target = ours(to) ? as_cpu(to, !late) : to;
  if (late) {  // pinned memory stays until the copy is done, as with CUDA's host allocator; the device's is looked after by `release`
    streams[stream].todo.push_back([source, target] {
      at::NoGradGuard none;
      c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
      target.copy_(source);
    });
  } else {
    run_all(stream);
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
    target.copy_(source);
    if (crosses && !non_blocking) wait_until(busy(stream)), join(host_clock, streams[stream].clock);
  }
  raise_complaints();
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const Tensor& t) {
  {
    std::lock_guard<std::recursive_mutex> lock(big);
    const int64_t stream = current_key(t.device().index());
    run_all(stream);
    wait_until(busy(stream));
    tick(stream);
    touch(t.storage().data(), stream, false, "item");
    join(host_clock, streams[stream].clock);
    raise_complaints();
  }
  return at::_local_scalar_dense(as_cpu(t));
}
const Tensor& resize(const Tensor& t, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), t.storage_offset());
  if (bytes > t.storage().nbytes()) hooks.resizePrivateUse1Bytes(t.storage(), bytes);
  return t;
}
Tensor& set_storage_at(Tensor& t, at::Storage s, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  TORCH_CHECK(s.device() == t.device(), "Attempted to set the storage of a tensor on device \"", t.device(), "\" to a storage on different device \"", s.device(), "\"");
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
  t.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::OptionalIntArrayRef given = strides.data() ? at::OptionalIntArrayRef(strides) : std::nullopt;
  if (given && (strides.size() == sizes.size())) t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  else t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage s) {
  const int64_t n = s.nbytes() / t.itemsize();
  return set_storage_at(t, s, 0, {n}, {});
}
Tensor& set_tensor(Tensor& t, const Tensor& s) { return set_storage_at(t, s.storage(), s.storage_offset(), s.sizes(), s.strides()); }
Tensor& set_none(Tensor& t) {
  const at::DeviceGuard guard(t.device());
  return set_storage_at(t, at::Storage(at::Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {});
}
void record_stream(Tensor& t, c10::Stream s) { allocator.recordStream(t.storage().data_ptr(), s); }

bool compatible(const Tensor& t, const Tensor& from) {  // whether `t.data = from` may change the device, as between CPU and CUDA
  auto dense = [](const Tensor& x) { return x.layout() == at::kStrided && (x.is_cpu() || x.is_privateuseone()); };
  return dense(t) && dense(from);
}
using Ints = c10::IntArrayRef;
Tensor seen(const Tensor& t, const char* op, c10::Device device) {
  if (!t.defined()) return t;
  TORCH_CHECK(t.device() == device, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
              t.device(), "! (", op, ")");
  std::lock_guard<std::recursive_mutex> lock(big);
  const int64_t stream = current_key(device.index());
  run_all(stream);
  tick(stream);
  work(stream);
  ++calls[op];
  if (t.numel()) touch(t.storage().data(), stream, false, op);
  raise_complaints();
  return as_cpu(t);
}
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, Ints stride, Ints padding, Ints dilation, bool transposed,
                   Ints extra, int64_t groups) {
  const auto d = x.device().type() == STRICT ? x.device() : w.device();
  return as_device(at::convolution(seen(x, "convolution", d), seen(w, "convolution", d), b ? seen(*b, "convolution", d) : Tensor(), stride,
                                   padding, dilation, transposed, extra, groups), d);
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, Ints stride, Ints padding, Ints dilation,
                                                        bool transposed, Ints extra, int64_t groups, std::array<bool, 3> mask) {
  const auto d = g.device();
  const int64_t outs = transposed ? w.size(1) * groups : w.size(0);
  auto [a, b, c] = at::convolution_backward(seen(g, "convolution_backward", d), seen(x, "convolution_backward", d), seen(w, "convolution_backward", d),
                                            at::OptionalIntArrayRef(Ints(outs)), stride, padding, dilation, transposed, extra, groups, mask);
  return {as_device(a, d), as_device(b, d), as_device(c, d)};
}

// Attention in one kernel wherever the CPU has one: the same numbers, and as on a GPU no matrix of tokens x tokens is kept.
using Maybe = std::optional<Tensor>;
int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa) {
  auto like = [](const Tensor& t) { return as_cpu(t).requires_grad_(t.requires_grad()); };
  if (!ours(q) || !ours(k) || !ours(v) || (mask && !ours(*mask))) return int64_t(at::SDPBackend::math);  // which says what is wrong
  const auto chosen = at::_fused_sdp_choice(like(q), like(k), like(v), mask ? Maybe(like(*mask)) : mask, dropout, causal, scale, gqa);
  return int64_t(chosen == int64_t(at::SDPBackend::flash_attention) ? at::SDPBackend::overrideable : at::SDPBackend::math);
}
using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Attended attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, double dropout, bool causal, bool,
                   std::optional<double> scale) {
  const auto d = q.device();
  auto s = [&](const Tensor& t) { return seen(t, "attention", d); };
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(s(q), s(k), s(v), dropout, causal, mask ? Maybe(s(*mask)) : mask, scale);
  return {as_device(out, d), as_device(sums, d), Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), Tensor(), Tensor(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                                              std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&,
                                                              c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&,
                                                              std::optional<double> scale) {
  const auto d = g.device();
  auto s = [&](const Tensor& t) { return seen(t, "attention_backward", d); };
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(s(g), s(q), s(k), s(v), s(out), s(sums), dropout, causal,
                                                                            mask.defined() ? Maybe(s(mask)) : std::nullopt, scale);
  return {as_device(a, d), as_device(b, d), as_device(c, d), Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_none);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  // Composites elsewhere, kernels of their own on the CPU and on GPUs.
  for (auto name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr", "addr.out", "_stack", "_stack.out",
                    "any.dims", "all.dims", "any.dims_out", "all.dims_out", "native_channel_shuffle", "linalg__powsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// `copy_from` reads conjugates and negatives itself; torch's fallbacks would copy them by a copy of them, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_OPT)
  AT_FORALL_PROMOTE(WIDEST)
}

// ---- collectives: another backend's, on the same bytes --------------------------------------------------------------------
struct Work final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<Tensor> outs;
  Work(c10::intrusive_ptr<c10d::Work> w, std::vector<Tensor> o) : inner(std::move(w)), outs(std::move(o)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  std::vector<Tensor> result() override { return outs; }
  void synchronize() override { inner->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner->wait(timeout); }
  void abort() override { inner->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto mine = outs;
    return inner->getFuture()->then([mine](c10::ivalue::Future& f) -> IValue { f.value(); return IValue(mine); },
                                    c10::ListType::create(c10::TensorType::get()));
  }
};
struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> b) : Backend(b->getRank(), b->getSize()), inner(std::move(b)) {}
  using Tensors = std::vector<Tensor>;
  using Lists = std::vector<Tensors>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "stccl"; }
  static Tensor one(const Tensor& t) {
    TORCH_CHECK(ours(t), "stccl: tensors must be on strict, found ", t.device());
    std::lock_guard<std::recursive_mutex> lock(big);
    run_all(current_key(t.device().index()));
    tick(current_key(t.device().index()));
    if (t.numel()) touch(t.storage().data(), current_key(t.device().index()), true, "collective");
    return as_cpu(t);
  }
  static Tensors all(const Tensors& ts) {
    Tensors r;
    for (auto& t : ts) r.push_back(one(t));
    return r;
  }
  static Lists all(const Lists& ls) {
    Lists r;
    for (auto& l : ls) r.push_back(all(l));
    return r;
  }
  static Pointer work(Pointer w, Tensors outs) { return c10::make_intrusive<Work>(std::move(w), std::move(outs)); }
  static Tensors flat(const Lists& ls) {
    Tensors r;
    for (auto& l : ls) r.insert(r.end(), l.begin(), l.end());
    return r;
  }
  Pointer broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { auto c = all(t); return work(inner->broadcast(c, o), t); }
  Pointer allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { auto c = all(t); return work(inner->allreduce(c, o), t); }
  Pointer allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override { auto c = all(t); return work(inner->allreduce_coalesced(c, o), t); }
  Pointer reduce(Tensors& t, const c10d::ReduceOptions& o) override { auto c = all(t); return work(inner->reduce(c, o), t); }
  Pointer allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override { auto a = all(out); auto b = all(in); return work(inner->allgather(a, b, o), flat(out)); }
  Pointer _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override { auto a = one(out), b = one(in); return work(inner->_allgather_base(a, b, o), {out}); }
  Pointer allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override { auto a = all(out), b = all(in); return work(inner->allgather_into_tensor_coalesced(a, b, o), out); }
  Pointer gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override { auto a = all(out); auto b = all(in); return work(inner->gather(a, b, o), flat(out)); }
  Pointer scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override { auto a = all(out); auto b = all(in); return work(inner->scatter(a, b, o), out); }
  Pointer reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override { auto a = all(out); auto b = all(in); return work(inner->reduce_scatter(a, b, o), out); }
  Pointer _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override { auto a = one(out), b = one(in); return work(inner->_reduce_scatter_base(a, b, o), {out}); }
  Pointer reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override { auto a = all(out), b = all(in); return work(inner->reduce_scatter_tensor_coalesced(a, b, o), out); }
  Pointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override { auto a = one(out), b = one(in); return work(inner->alltoall_base(a, b, os, is, o), {out}); }
  Pointer alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override { auto a = all(out), b = all(in); return work(inner->alltoall(a, b, o), out); }
  Pointer send(Tensors& t, int rank, int tag) override { auto c = all(t); return work(inner->send(c, rank, tag), t); }
  Pointer recv(Tensors& t, int rank, int tag) override { auto c = all(t); return work(inner->recv(c, rank, tag), t); }
  Pointer barrier(const c10d::BarrierOptions& o) override { return inner->barrier(o); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds t) override { inner->setTimeout(t); }
};

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", &count);
  m.def("hide", [] { hidden = true; });
  m.def("set_op_us", [](int64_t us) { op_us = us; });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int d) { Guard().setDevice({STRICT, (c10::DeviceIndex)d}); });
  m.def("init", &use);
  m.def("is_initialized", [] { return used && !bad_fork; });
  m.def("bad_fork", [] { return bool(bad_fork); });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("memory", [](int d) { return std::make_tuple(arena().now[d], arena().peak[d], MEMORY); });
  m.def("reset_peak", [](int d) { allocator.resetPeakStats(d); });
  m.def("calls", [] { std::lock_guard<std::recursive_mutex> lock(big); return calls; });
  m.def("wrap_backend", [](const c10::intrusive_ptr<c10d::Backend>& b) -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<Collectives>(b); });
}
