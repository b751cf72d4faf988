#include "cc/ranks/group.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "cc/table/half.h"

namespace dynemb {
namespace {

// A rank's announcement of an operation to another rank.
struct Announcement {
  uint64_t operation;  // the hash of its kind and name
  int64_t rows;
  uint64_t row_bytes;
  char form[40];  // the beginning of Operation::form, with zeros after it
  uint64_t form_hash;
};

// FNV-1a, 64 bits: the same on all ranks.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash;
}

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

// The other ranks wait for this one until their timeout, and then name it.
Status NoMemory(const std::string& text) {
  return ResourceExhausted(text + ": out of memory for its result");
}

}  // namespace

// One operation, and memory that lives as long as the wire may write to it.
struct Group::Call {
  struct Memory {
    std::vector<Announcement> said, heard;
    std::vector<char> parts;
  };

  Call(const char* kind, const Operation& operation, Group* group)
      : text(std::string(kind) + " '" + operation.name + "'"),
        hash(HashOf(text)),
        form(operation.form),
        iteration(operation.iteration),
        group(group),
        wire(group->wire_.get()),
        memory(std::make_unique<Memory>()) {
    tag = hash + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(iteration);
    std::lock_guard<std::mutex> lock(group->mutex_);
    is_only = group->running_.insert({hash, iteration}).second;
  }
  ~Call() {
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

  Status Exchange(const Slices& to, const Slices& from) {
    Status status = wire->Exchange(tag + round++, text, to, from);
    if (!status.ok()) {
      static std::mutex mutex;
      static auto* const kept = new std::vector<std::unique_ptr<Memory>>;
      std::lock_guard<std::mutex> lock(mutex);
      kept->push_back(std::exchange(memory, nullptr));
    }
    return status;
  }

  const std::string text;
  const uint64_t hash;
  const std::string form;
  const int64_t iteration;
  Group* const group;
  Wire* const wire;
  std::unique_ptr<Memory> memory;
  uint64_t tag, round = 0;
  bool is_only;
};

void Group::Leave() { (void)wire_->Fail("rank " + std::to_string(rank()) + " has left the group"); }

Status Group::Announce(Call* call, const std::vector<int64_t>& rows, size_t row_bytes,
                       std::vector<int64_t>* received) {
  DYNEMB_RETURN_IF_ERROR(call->CheckOnly());
  const auto ranks = static_cast<size_t>(size());
  std::vector<Announcement>&said = call->memory->said, &heard = call->memory->heard;
  said.resize(ranks);
  heard.resize(ranks);
  Slices to(size()), from(size());
  for (size_t r = 0; r < ranks; ++r) {
    said[r] = {call->hash, rows[r], row_bytes, {}, HashOf(call->form)};
    call->form.copy(said[r].form, sizeof(said[r].form) - 1);
    to.of[r] = {reinterpret_cast<char*>(&said[r]), sizeof(Announcement)};
    from.of[r] = {reinterpret_cast<char*>(&heard[r]), sizeof(Announcement)};
  }
  DYNEMB_RETURN_IF_ERROR(call->Exchange(to, from));
  received->resize(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    const Announcement& other = heard[r];
    const std::string on = call->text + ": rank " + std::to_string(r);
    if (other.operation != call->hash) {
      return Internal(on + " runs another operation, whose name has the same hash");
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
  }
  return Status();
}

Status Group::Alltoall(const Operation& operation, const char* data,
                       const std::vector<int64_t>& rows, size_t row_bytes,
                       std::vector<int64_t>* received, Allocate allocate) {
  Call call("alltoall", operation, this);
  DYNEMB_RETURN_IF_ERROR(Announce(&call, rows, row_bytes, received));
  char* result = allocate(std::accumulate(received->begin(), received->end(), int64_t{0}));
  if (result == nullptr) return NoMemory(call.text);
  Slices to(size()), from(size());
  for (int r = 0; r < size(); ++r) {
    const auto i = static_cast<size_t>(r);
    to[r] = {const_cast<char*>(data), static_cast<size_t>(rows[i]) * row_bytes};
    from[r] = {result, static_cast<size_t>((*received)[i]) * row_bytes};
    data += to[r].bytes;
    result += from[r].bytes;
  }
  return call.Exchange(to, from);
}

Status Group::Allgather(const Operation& operation, const char* data, int64_t rows,
                        size_t row_bytes, Allocate allocate) {
  Call call("allgather", operation, this);
  std::vector<int64_t> received;
  const std::vector<int64_t> same(static_cast<size_t>(size()), rows);
  DYNEMB_RETURN_IF_ERROR(Announce(&call, same, row_bytes, &received));
  char* result = allocate(std::accumulate(received.begin(), received.end(), int64_t{0}));
  if (result == nullptr) return NoMemory(call.text);
  Slices to(size()), from(size());
  for (int r = 0; r < size(); ++r) {
    to[r] = {const_cast<char*>(data), static_cast<size_t>(rows) * row_bytes};
    from[r] = {result, static_cast<size_t>(received[static_cast<size_t>(r)]) * row_bytes};
    result += from[r].bytes;
  }
  return call.Exchange(to, from);
}

Status Group::Broadcast(const Operation& operation, int root, char* data, size_t bytes) {
  if (root < 0 || root >= size()) {
    return InvalidArgument("root " + std::to_string(root) + " is not one of " +
                           std::to_string(size()) + " ranks");
  }
  Call call("broadcast",
            {operation.name + "' of '" + std::to_string(root), operation.iteration, operation.form},
            this);
  std::vector<int64_t> received;
  DYNEMB_RETURN_IF_ERROR(
      Announce(&call, std::vector<int64_t>(static_cast<size_t>(size()), 1), bytes, &received));
  Slices to(size()), from(size());
  if (rank() == root) {
    for (int r = 0; r < size(); ++r) {
      if (r != root) to[r] = {data, bytes};
    }
  } else {
    from[root] = {data, bytes};
  }
  return call.Exchange(to, from);
}

Status Group::Allreduce(const Operation& operation, Number type, const char* data, char* result,
                        size_t n) {
  Call call("allreduce", operation, this);
  const auto ranks = static_cast<size_t>(size());
  const size_t width = BytesOf(type);
  std::vector<int64_t> received;
  DYNEMB_RETURN_IF_ERROR(
      Announce(&call, std::vector<int64_t>(ranks, static_cast<int64_t>(n)), width, &received));
  for (size_t r = 0; r < ranks; ++r) {
    if (received[r] != static_cast<int64_t>(n)) {
      return InvalidArgument(call.text + ": rank " + std::to_string(r) + " has " +
                             std::to_string(received[r]) + " elements, and rank " +
                             std::to_string(rank()) + " has " + std::to_string(n));
    }
  }
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
  DYNEMB_RETURN_IF_ERROR(call.Exchange(to, from));
  if (few) {
    Sum(type, parts.data(), ranks, own, own, result);
    return Status();
  }
  Sum(type, parts.data(), ranks, own, own, parts.data());
  for (size_t r = 0; r < ranks; ++r) {
    from.of[r] = {result + first(r) * width, (first(r + 1) - first(r)) * width};
    to.of[r] = {parts.data(), own * width};
  }
  return call.Exchange(to, from);
}

}  // namespace dynemb
