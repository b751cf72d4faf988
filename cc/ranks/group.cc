#include "cc/ranks/group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "cc/table/half.h"

namespace dynemb {
namespace {

// A rank's announcement of an operation to another rank. Its data for that rank follow, if they
// are at most Room() bytes.
struct Announcement {
  uint64_t operation;  // the hash of its kind and name
  int64_t rows;        // kRefused: this rank does not take part; row_bytes bytes say why
  uint64_t row_bytes;
  int64_t turn;      // the number of an operation that takes a turn, from rank 0; otherwise kNoTurn
  uint64_t largest;  // the most bytes that this rank sends to another one
  char form[40];     // the beginning of Operation::form, with zeros after it
  uint64_t form_hash;
};

constexpr int64_t kRefused = -1;
constexpr int64_t kNoTurn = -1;

// The most bytes of data in an announcement, the same on all ranks. All announcements of a rank
// together take about 64 KiB, or 128 bytes for each rank.
size_t Room(int ranks) {
  constexpr size_t kMost = 16 << 10, kLeast = 128, kAll = 64 << 10;
  static_assert(sizeof(Announcement) + kMost <= Wire::kMostShort);
  return std::max(kLeast, std::min(kMost, kAll / static_cast<size_t>(ranks))) / 8 * 8;
}

// FNV-1a, 64 bits: the same on all ranks.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash;
}

// How often Await looks at the other ranks; how long it waits for what a rank has sent that has
// ended since; and its pauses.
constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::seconds kToArrive{2};
constexpr int kQuickPolls = 200;
constexpr std::chrono::microseconds kPause{20};

// Up to this number of bytes, each rank sends all it has to all others, which saves one round.
constexpr size_t kFewBytes = 16 << 10;

template <class T>
struct Same {
  using Sum = T;
  static Sum Load(T value) { return value; }
  static T Store(Sum sum) { return sum; }
};
template <DType kType>
struct Half {
  using Sum = float;
  static Sum Load(uint16_t value) { return HalfFormat<kType>::ToFloat(value); }
  static uint16_t Store(Sum sum) { return HalfFormat<kType>::ToNearest(sum); }
};

// Sets result[i] to the sum of parts[r * stride + i] for all ranks r.
template <class T, class Type>
void SumParts(const char* parts, size_t ranks, size_t stride, size_t n, char* result) {
  for (size_t i = 0; i < n; ++i) {
    typename Type::Sum sum{};
    for (size_t r = 0; r < ranks; ++r) {
      T value;
      memcpy(&value, parts + (r * stride + i) * sizeof(T), sizeof(T));
      sum = r == 0 ? Type::Load(value) : static_cast<typename Type::Sum>(sum + Type::Load(value));
    }
    const T stored = Type::Store(sum);
    memcpy(result + i * sizeof(T), &stored, sizeof(T));
  }
}

size_t BytesOf(Number type) {
  switch (type) {
    case Number::kFloat16:
    case Number::kBfloat16:
      return 2;
    case Number::kInt32:
    case Number::kFloat32:
      return 4;
    case Number::kInt64:
    case Number::kFloat64:
      return 8;
  }
  return 0;
}

void Sum(Number type, const char* parts, size_t ranks, size_t stride, size_t n, char* result) {
  switch (type) {
    // Unsigned: the sum of integers wraps around.
    case Number::kInt32:
      return SumParts<uint32_t, Same<uint32_t>>(parts, ranks, stride, n, result);
    case Number::kInt64:
      return SumParts<uint64_t, Same<uint64_t>>(parts, ranks, stride, n, result);
    case Number::kFloat16:
      return SumParts<uint16_t, Half<DType::kFloat16>>(parts, ranks, stride, n, result);
    case Number::kBfloat16:
      return SumParts<uint16_t, Half<DType::kBfloat16>>(parts, ranks, stride, n, result);
    case Number::kFloat32:
      return SumParts<float, Same<float>>(parts, ranks, stride, n, result);
    case Number::kFloat64:
      return SumParts<double, Same<double>>(parts, ranks, stride, n, result);
  }
}

}  // namespace

// One operation, and memory that lives as long as the wire may write to it.
struct Group::Call {
  // The announcements to all ranks and from all ranks, with their data.
  struct Memory {
    std::unique_ptr<char[]> said, heard;
    std::vector<char> parts;
  };

  Call(const char* kind, const Operation& operation, Group* group)
      : text(std::string(kind) + " '" + operation.name + "'"),
        hash(HashOf(text)),
        form(operation.form),
        iteration(operation.iteration),
        group(group),
        wire(group->wire_.get()),
        room(Room(wire->size())),
        memory(std::make_unique<Memory>()) {
    tag = hash + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(iteration);
    std::lock_guard<std::mutex> lock(group->mutex_);
    is_only = group->running_.insert({hash, iteration}).second;
  }
  ~Call() {
    if (turn != kNoTurn) group->EndTurn(turn);
    if (!is_only) return;
    std::lock_guard<std::mutex> lock(group->mutex_);
    group->running_.erase({hash, iteration});
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Status CheckOnly() const {
    if (is_only) return Status();
    return InvalidArgument(text + " runs already on rank " + std::to_string(wire->rank()) +
                           ": operations that run at the same time need different names");
  }

  // The announcement to a rank, or from one; its data follow.
  char* At(const std::unique_ptr<char[]>& announcements, size_t rank) const {
    return announcements.get() + rank * (sizeof(Announcement) + room);
  }
  static Announcement* Head(char* at) { return reinterpret_cast<Announcement*>(at); }
  static char* Data(char* at) { return at + sizeof(Announcement); }

  // No slice to another rank has more than `most` bytes, which is the same on all ranks.
  Status Exchange(size_t most, const Slices& to, const Slices& from) {
    Status status = wire->ExchangeAtMost(most, tag + round++, text, to, from);
    if (!status.ok()) KeepForever(std::move(memory));
    return status;
  }

  const std::string text;
  const uint64_t hash;
  std::string form;
  const int64_t iteration;
  Group* const group;
  Wire* const wire;
  const size_t room;
  std::unique_ptr<Memory> memory;
  uint64_t tag, round = 0;
  size_t largest = 0;  // the most bytes that a rank sends to another one, of all ranks
  bool is_only;
  bool in_turn = false;    // takes a turn
  int64_t turn = kNoTurn;  // as rank 0 has said, also if this rank takes none
};

void Group::Leave() { (void)wire_->Fail("rank " + std::to_string(rank()) + " has left the group"); }

// Exchanges announcements, with data of to[r] that have room in them. Fails if another one does not
// fit to this rank's.
Status Group::Announce(Call* call, const std::vector<int64_t>& rows, size_t row_bytes,
                       const Slices& to, std::vector<int64_t>* received) {
  DYNEMB_RETURN_IF_ERROR(call->CheckOnly());
  const auto ranks = static_cast<size_t>(size());
  const size_t each = sizeof(Announcement) + call->room;
  Call::Memory* const memory = call->memory.get();
  memory->said.reset(new char[ranks * each]);
  memory->heard.reset(new char[ranks * each]);
  Slices saying(size()), hearing(size());
  if (call->in_turn && rank() == 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    call->turn = next_number_++;
  }
  call->largest = 0;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) call->largest = std::max(call->largest, to[r].bytes);
  }
  for (size_t r = 0; r < ranks; ++r) {
    char* const said = call->At(memory->said, r);
    Announcement* const head = new (said) Announcement{
        call->hash, rows[r], row_bytes, call->turn, call->largest, {}, HashOf(call->form)};
    call->form.copy(head->form, sizeof(head->form) - 1);
    const bool fits = r != static_cast<size_t>(rank()) && to.of[r].bytes <= call->room;
    const size_t bytes = fits ? to.of[r].bytes : 0;
    if (bytes != 0) memcpy(Call::Data(said), to.of[r].data, bytes);
    saying.of[r] = {said, sizeof(Announcement) + bytes};
    hearing.of[r] = {call->At(memory->heard, r), each};
  }
  DYNEMB_RETURN_IF_ERROR(call->Exchange(each, saying, hearing));
  call->turn = Call::Head(call->At(memory->heard, 0))->turn;
  received->resize(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    char* const heard = call->At(memory->heard, r);
    const Announcement& other = *Call::Head(heard);
    const std::string on = call->text + ": rank " + std::to_string(r);
    if (other.operation != call->hash) {
      return Internal(on + " runs another operation, whose name has the same hash");
    }
    if (rows[r] == kRefused) continue;
    if (other.rows == kRefused) {
      const size_t bytes = std::min(call->room, static_cast<size_t>(other.row_bytes));
      return InvalidArgument(on + ": " + std::string(Call::Data(heard), bytes));
    }
    if (other.form_hash != HashOf(call->form)) {
      return InvalidArgument(on + " has " + other.form + ", and rank " + std::to_string(rank()) +
                             " has " + call->form);
    }
    if (other.row_bytes != row_bytes) {
      return InvalidArgument(on + " has " + std::to_string(other.row_bytes) +
                             " bytes a row, and rank " + std::to_string(rank()) + " has " +
                             std::to_string(row_bytes));
    }
    (*received)[r] = other.rows;
    call->largest = std::max(call->largest, static_cast<size_t>(other.largest));
  }
  return Status();
}

Status Group::Refuse(const char* kind, const Operation& operation, const std::string& reason) {
  Call call(kind, operation, this);
  std::string text = reason;
  text.resize(std::min(text.size(), call.room));
  Slices to(size());
  for (Slices::Slice& slice : to.of) slice = {text.data(), text.size()};
  std::vector<int64_t> received;
  return Announce(&call, std::vector<int64_t>(to.of.size(), kRefused), text.size(), to, &received);
}

// Brings the data: those in announcements, and the rest by an exchange.
Status Group::Deliver(Call* call, const Slices& to, const Slices& from) {
  Slices more_to = to, more_from = from;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    if (to[r].bytes <= call->room) more_to[r].bytes = 0;
    if (from[r].bytes <= call->room) {
      char* const heard = call->At(call->memory->heard, static_cast<size_t>(r));
      if (from[r].bytes != 0) memcpy(from[r].data, Call::Data(heard), from[r].bytes);
      more_from[r].bytes = 0;
    }
  }
  // A rank that has no data takes part, too: data of others may be forwarded by it.
  if (call->largest > call->room) return call->Exchange(call->largest, more_to, more_from);
  ++call->round;
  const Slices::Slice& own = to[rank()];
  if (own.bytes != 0) memcpy(from[rank()].data, own.data, own.bytes);
  return Status();
}

// Announces rows to all ranks, and receives theirs, in their order.
Status Group::Gather(Call* call, const std::vector<int64_t>& rows, size_t row_bytes,
                     const Slices& to, std::vector<int64_t>* received, Allocate allocate,
                     const TakeTurn* take_turn) {
  call->in_turn = take_turn != nullptr;
  if (call->in_turn) call->form += " on a GPU";
  const Slices none(size());
  DYNEMB_RETURN_IF_ERROR(Announce(call, rows, row_bytes, call->in_turn ? none : to, received));
  char* result = allocate(std::accumulate(received->begin(), received->end(), int64_t{0}));
  if (result == nullptr) {
    const std::string reason =
        call->text + ": rank " + std::to_string(rank()) + " is out of memory for its result";
    (void)wire_->Fail(reason);  // the others may wait for data
    return ResourceExhausted(reason);
  }
  Slices from(size());
  for (int r = 0; r < size(); ++r) {
    from[r] = {result, static_cast<size_t>((*received)[static_cast<size_t>(r)]) * row_bytes};
    result += from[r].bytes;
  }
  if (!call->in_turn) return Deliver(call, to, from);
  DYNEMB_RETURN_IF_ERROR(AwaitTurn(*call));
  const Status status = (*take_turn)(to, from);
  return status.ok() ? status : wire_->Fail(call->text + ": " + status.message());
}

Status Group::Alltoall(const Operation& operation, const char* data,
                       const std::vector<int64_t>& rows, size_t row_bytes,
                       std::vector<int64_t>* received, Allocate allocate,
                       const TakeTurn* take_turn) {
  Call call("alltoall", operation, this);
  Slices to(size());
  for (int r = 0; r < size(); ++r) {
    const size_t bytes = static_cast<size_t>(rows[static_cast<size_t>(r)]) * row_bytes;
    to[r] = {const_cast<char*>(data), bytes};
    data += bytes;
  }
  return Gather(&call, rows, row_bytes, to, received, allocate, take_turn);
}

Status Group::Allgather(const Operation& operation, const char* data, int64_t rows,
                        size_t row_bytes, Allocate allocate, const TakeTurn* take_turn) {
  Call call("allgather", operation, this);
  std::vector<int64_t> received;
  const std::vector<int64_t> same(static_cast<size_t>(size()), rows);
  Slices to(size());
  for (Slices::Slice& slice : to.of) {
    slice = {const_cast<char*>(data), static_cast<size_t>(rows) * row_bytes};
  }
  return Gather(&call, same, row_bytes, to, &received, allocate, take_turn);
}

Status Group::AwaitTurn(const Call& call) {
  return Await(call.text, [&](bool* done) {
    std::unique_lock<std::mutex> lock(mutex_);
    *done = turn_ended_.wait_for(lock, kLook, [&] { return turn_ == call.turn; });
    return Status();
  });
}

void Group::EndTurn(int64_t turn) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_turns_.insert(turn);
    while (ended_turns_.erase(turn_) != 0) ++turn_;
  }
  turn_ended_.notify_all();
}

Status Group::Await(const std::string& operation, Poll poll) {
  using Clock = std::chrono::steady_clock;
  const std::string on = operation + " on rank " + std::to_string(rank()) + ": ";
  const Clock::time_point end = Clock::now() + wire_->timeout();
  Clock::time_point next_look = Clock::now() + kLook;
  Clock::time_point noticed = Clock::time_point::max();  // that a rank has ended
  for (int calls = 0;; ++calls) {
    bool done = false;
    const Status status = poll(&done);
    if (!status.ok()) return wire_->Fail(on + status.message());
    if (done) return Status();
    if (calls < kQuickPolls) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
    const Clock::time_point now = Clock::now();
    if (now < next_look) continue;
    next_look = now + kLook;
    std::vector<bool> ended;
    DYNEMB_RETURN_IF_ERROR(wire_->Look(&ended));
    const auto gone = std::find(ended.begin(), ended.end(), true);
    if (gone != ended.end()) noticed = std::min(noticed, now);
    if (gone != ended.end() && now >= noticed + kToArrive) {
      return wire_->Fail(on + "rank " + std::to_string(gone - ended.begin()) + " has ended");
    }
    if (now >= end) {
      return wire_->Fail(on + "has not ended within " + Wire::Seconds(wire_->timeout()));
    }
  }
}

Status Group::Broadcast(const Operation& operation, int root, char* data, size_t bytes) {
  if (root < 0 || root >= size()) {
    return InvalidArgument("root " + std::to_string(root) + " is not one of " +
                           std::to_string(size()) + " ranks");
  }
  Call call("broadcast",
            {operation.name + "' of '" + std::to_string(root), operation.iteration, operation.form},
            this);
  Slices to(size()), from(size());
  if (rank() == root) {
    for (int r = 0; r < size(); ++r) {
      if (r != root) to[r] = {data, bytes};
    }
  } else {
    from[root] = {data, bytes};
  }
  std::vector<int64_t> received;
  DYNEMB_RETURN_IF_ERROR(
      Announce(&call, std::vector<int64_t>(static_cast<size_t>(size()), 1), bytes, to, &received));
  return Deliver(&call, to, from);
}

Status Group::Allreduce(const Operation& operation, Number type, const char* data, char* result,
                        size_t n) {
  Call call("allreduce", operation, this);
  const auto ranks = static_cast<size_t>(size());
  const size_t width = BytesOf(type);
  // Rank r sums the elements from first(r) on; or, if they are few, each rank sums all.
  const bool few = n * width * ranks <= kFewBytes;
  const auto first = [&](size_t r) { return n / ranks * r + std::min(r, n % ranks); };
  const auto self = static_cast<size_t>(rank());
  const size_t own = few ? n : first(self + 1) - first(self);
  std::vector<char>& parts = call.memory->parts;
  parts.resize(own * width * ranks);
  Slices to(size()), from(size());
  for (size_t r = 0; r < ranks; ++r) {
    const size_t begin = few ? 0 : first(r), end = few ? n : first(r + 1);
    to.of[r] = {const_cast<char*>(data) + begin * width, (end - begin) * width};
    from.of[r] = {parts.data() + r * own * width, own * width};
  }
  std::vector<int64_t> received;
  DYNEMB_RETURN_IF_ERROR(
      Announce(&call, std::vector<int64_t>(ranks, static_cast<int64_t>(n)), width, to, &received));
  for (size_t r = 0; r < ranks; ++r) {
    if (received[r] != static_cast<int64_t>(n)) {
      return InvalidArgument(call.text + ": rank " + std::to_string(r) + " has " +
                             std::to_string(received[r]) + " elements, and rank " +
                             std::to_string(rank()) + " has " + std::to_string(n));
    }
  }
  DYNEMB_RETURN_IF_ERROR(Deliver(&call, to, from));
  if (few) {
    Sum(type, parts.data(), ranks, own, own, result);
    return Status();
  }
  Sum(type, parts.data(), ranks, own, own, parts.data());
  for (size_t r = 0; r < ranks; ++r) {
    from.of[r] = {result + first(r) * width, (first(r + 1) - first(r)) * width};
    to.of[r] = {parts.data(), own * width};
  }
  return call.Exchange((n / ranks + 1) * width, to, from);
}

}  // namespace dynemb
