#include "cc/lookup/route.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "cc/lookup/tasks.h"
#include "cc/table/phase.h"
#include "cc/table/scratch.h"

namespace dynemb {
namespace {

constexpr size_t kWord = sizeof(int32_t);
constexpr size_t kMaxWords = std::numeric_limits<int32_t>::max();
constexpr size_t kPartitionGrain = 4;

}  // namespace

Status CheckRoute(const std::vector<RouteTask>& tasks, uint32_t ranks) {
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Owners& owners = tasks[t].owners;
    size_t n = 0;
    for (const RouteIds& ids : tasks[t].features) n += ids.n;
    Status status = Dedup<uint64_t>::Check(n, owners);
    if (owners.ranks != ranks || owners.one >= ranks) {
      status = InvalidArgument("its owner is rank " + std::to_string(owners.one) + " of " +
                               std::to_string(owners.ranks) + ", but there are " +
                               std::to_string(ranks) + " ranks");
    }
    if (!status.ok()) {
      return Status(status.code(), "table " + std::to_string(t) + ": " + status.message());
    }
  }
  return {};
}

std::vector<KeyType> KeyTypesOf(const std::vector<RouteTask>& tasks) {
  std::vector<KeyType> key_types;
  for (const RouteTask& task : tasks) key_types.push_back(task.key_type);
  return key_types;
}

Status SizesOf(const std::vector<KeyType>& key_types, std::vector<int64_t> counts, uint32_t ranks,
               uint32_t self, RouteSizes* sizes) {
  sizes->counts = std::move(counts);
  sizes->words.assign(ranks, 0);
  sizes->num_own_words = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    size_t words = key_types.size();
    for (size_t t = 0; t < key_types.size(); ++t) {
      words += static_cast<size_t>(sizes->counts[t * ranks + rank]) * WordsPerKey(key_types[t]);
    }
    if (words > kMaxWords) {
      return InvalidArgument("the keys for rank " + std::to_string(rank) + " are " +
                             std::to_string(words * kWord) +
                             " bytes, but a message has at most 2^33: use smaller batches");
    }
    (rank == self ? sizes->num_own_words : sizes->words[rank]) = words;
  }
  return {};
}

Status Route::Prepare(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks,
                      uint32_t self) {
  Phase phase("route ids");
  DYNEMB_RETURN_IF_ERROR(CheckRoute(tasks, ranks));
  const size_t num_tables = tasks.size();
  key_types_ = KeyTypesOf(tasks);
  self_ = self;
  if (prepared_.size() < num_tables) prepared_.resize(num_tables);
  std::vector<size_t> sizes(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    prepared_[t].task = tasks[t];
    prepared_[t].n = 0;
    for (const RouteIds& ids : tasks[t].features) prepared_[t].n += ids.n;
    sizes[t] = prepared_[t].n;
  }
  std::vector<Status> statuses(num_tables);
  ForEachTask(exec, sizes, [&](Exec& e, size_t t) { statuses[t] = PrepareTask(e, &prepared_[t]); });
  for (const Status& status : statuses) DYNEMB_RETURN_IF_ERROR(status);
  std::vector<int64_t> counts(num_tables * ranks);
  for (size_t t = 0; t < num_tables; ++t) {
    const Prepared& p = prepared_[t];
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      counts[t * ranks + rank] =
          static_cast<int64_t>(p.dedup.owner_begin(rank + 1) - p.dedup.owner_begin(rank));
    }
  }
  return SizesOf(key_types_, std::move(counts), ranks, self, &sizes_);
}

Status Route::PrepareTask(Exec& exec, Prepared* prepared) {
  return SizeOf(prepared->task.key_type) == 8 ? PrepareKeys<uint64_t>(exec, prepared)
                                              : PrepareKeys<uint32_t>(exec, prepared);
}

template <class K>
Status Route::PrepareKeys(Exec& exec, Prepared* prepared) {
  const std::vector<RouteIds>& features = prepared->task.features;
  const Owners& owners = prepared->task.owners;
  if (features.size() == 1) {
    const auto* keys = static_cast<const K*>(features[0].keys);
    DYNEMB_RETURN_IF_ERROR(prepared->dedup.Run(exec, keys, features[0].n, owners));
    prepared->dedup.WriteInverse(exec, features[0].index);
    return {};
  }
  K* const keys = reinterpret_cast<K*>(prepared->keys.Resize(prepared->n));
  uint32_t* const index = prepared->index.Resize(prepared->n);
  size_t at = 0;
  for (const RouteIds& ids : features) {
    if (ids.n > 0) memcpy(keys + at, ids.keys, ids.n * sizeof(K));
    at += ids.n;
  }
  DYNEMB_RETURN_IF_ERROR(prepared->dedup.Run(exec, keys, prepared->n, owners));
  prepared->dedup.WriteInverse(exec, index);
  at = 0;
  for (const RouteIds& ids : features) {
    if (ids.n > 0) memcpy(ids.index, index + at, ids.n * sizeof(uint32_t));
    at += ids.n;
  }
  return {};
}

void Route::Shrink() {
  RenewLarge(&prepared_, [](const Prepared& p) { return p.n * sizeof(uint64_t); });
}

void Route::Write(Exec& exec, int32_t* words, int32_t* own) const {
  Phase phase("write keys to send");
  const size_t num_tables = key_types_.size(), ranks = sizes_.words.size();
  // Where the keys of each table for each rank begin.
  std::vector<int32_t*> begins(num_tables * ranks);
  ForEachSection(key_types_, sizes_, self_, words, own,
                 [&](size_t t, uint32_t rank, int32_t* header, int32_t* keys) {
                   *header = static_cast<int32_t>(count(t, rank));
                   begins[t * ranks + rank] = keys;
                 });
  std::vector<size_t> sizes(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    sizes[t] = prepared_[t].dedup.num_partitions();
  }
  const auto copy = [&](const auto& dedup, size_t t, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const auto partition = dedup.partition(i);
      if (partition.num_unique == 0) continue;
      constexpr size_t kKey = sizeof(*partition.unique);
      const uint32_t owner = dedup.owner(i);
      const size_t before = partition.unique_begin - dedup.owner_begin(owner);
      memcpy(begins[t * ranks + owner] + before * (kKey / kWord), partition.unique,
             partition.num_unique * kKey);
    }
  };
  ParallelForTasks(
      exec, sizes, std::vector<size_t>(num_tables, kPartitionGrain),
      [&](size_t t, size_t begin, size_t end) {
        prepared_[t].dedup.Visit([&](const auto& dedup) { copy(dedup, t, begin, end); });
      });
}

Status Requests::Init(const Received& received, const std::vector<KeyType>& key_types) {
  return Init(received, key_types, Headers(received, key_types.size()));
}

std::vector<const int32_t*> Requests::Headers(const Received& received, size_t tables) {
  std::vector<const int32_t*> headers;
  int64_t begin = 0;
  for (uint32_t rank = 0; rank < received.ranks; ++rank) {
    const int64_t split = received.splits[rank];
    const bool is_own = rank == received.self;
    const int64_t size = is_own ? received.num_own_words : split;
    const bool fits = split >= 0 && begin + split <= received.num_words;
    if (!fits || static_cast<int64_t>(tables) > size) break;
    headers.push_back(is_own ? received.own : received.words + begin);
    begin += split;
  }
  return headers;
}

Status Requests::Init(const Received& received, const std::vector<KeyType>& key_types,
                      const std::vector<const int32_t*>& headers) {
  ranks_ = received.ranks;
  key_types_ = key_types;
  const size_t tables = key_types.size();
  counts_.assign(tables * ranks_, 0);
  begins_.assign(tables * ranks_, nullptr);
  int64_t begin = 0;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const int64_t split = received.splits[rank];
    const bool is_own = rank == received.self;
    const int32_t* const message = is_own ? received.own : received.words + begin;
    const int64_t size = is_own ? received.num_own_words : split;
    auto at = static_cast<int64_t>(tables);
    bool fits = rank < headers.size();
    for (size_t t = 0; fits && t < tables; ++t) {
      const int64_t keys = headers[rank][t];
      counts_[t * ranks_ + rank] = keys;
      begins_[t * ranks_ + rank] = message + at;
      at += keys * static_cast<int64_t>(WordsPerKey(key_types[t]));
      fits = keys >= 0 && at <= size;
    }
    if (!fits || at != size || (is_own && split != 0)) {
      return InvalidArgument("the message of rank " + std::to_string(rank) +
                             " is not a request for keys of " + std::to_string(tables) +
                             " tables: all ranks must make the same call");
    }
    begin += split;
  }
  if (begin != received.num_words) {
    return InvalidArgument("the messages of " + std::to_string(ranks_) + " ranks are " +
                           std::to_string(begin) + " words, got " +
                           std::to_string(received.num_words));
  }
  return {};
}

int64_t Requests::num_keys(size_t table) const {
  int64_t keys = 0;
  for (uint32_t rank = 0; rank < ranks_; ++rank) keys += count(table, rank);
  return keys;
}

void Requests::CopyKeys(size_t table, void* keys) const {
  char* to = static_cast<char*>(keys);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const size_t bytes = static_cast<size_t>(count(table, rank)) * SizeOf(key_types_[table]);
    if (bytes > 0) memcpy(to, begins_[table * ranks_ + rank], bytes);
    to += bytes;
  }
}

}  // namespace dynemb
