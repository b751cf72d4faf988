#include "cc/serving/table_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/io/key_index.h"
#include "cc/table/hash.h"
#include "cc/table/vector_buffer.h"
#include "cc/table/vector_format.h"

namespace dynemb {
namespace {

constexpr uint64_t kGrowth = 4;

Status OpenColumn(Exec& exec, const Manifest& manifest, const ShardEntry& shard, const char* name,
                  bool verify, std::unique_ptr<VerifiedFile>* file) {
  DYNEMB_RETURN_IF_ERROR(VerifiedFile::Open(manifest, shard.columns.at(name), file));
  return verify ? (*file)->VerifyAll(exec) : Status();
}

// Whether a key is in a source twice: the search for one of its positions then ends at the other.
template <class K>
bool HasRepeatedKeys(const RowSource& source) {
  const uint64_t mask = (uint64_t{1} << source.log_slots) - 1;
  for (uint64_t i = 0; i < source.n; ++i) {
    const K key = LoadUnaligned<K>(source.keys + i * sizeof(K));
    for (uint64_t at = HashKey(key, source.salt) >> (64 - source.log_slots);
         source.slots[at] != i + 1; at = (at + 1) & mask) {
      const uint64_t other = source.slots[at] - 1;
      if (LoadUnaligned<K>(source.keys + other * sizeof(K)) == key) return true;
    }
  }
  return false;
}

void Append(std::vector<char>* to, const char* from, size_t bytes) {
  to->insert(to->end(), from, from + bytes);
}

}  // namespace

Status TableRows::OfBase(Exec& exec, const Manifest& manifest, const TableEntry& entry, bool verify,
                         std::shared_ptr<const TableRows>* rows) {
  auto made = std::make_shared<TableRows>();
  made->entry_ = entry;
  auto base = std::make_shared<Base>();
  for (const ShardEntry& shard : entry.shards) {
    if (shard.columns.count("index") == 0) {
      return InvalidArgument(manifest.directory + ": table '" + entry.name + "' has " +
                             std::to_string(shard.rows) + " rows in one shard and therefore no " +
                             "index; lookups are only possible if more ranks write the dump");
    }
    base->shards.emplace_back();
    Shard& s = base->shards.back();
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "index", verify, &s.slots));
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "keys", verify, &s.keys));
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "vectors", verify, &s.vectors));
    s.source.slots = reinterpret_cast<const uint32_t*>(s.slots->data());
    s.source.keys = s.keys->data();
    s.source.vectors = s.vectors->data();
    s.source.salt = shard.index_salt;
    s.source.log_slots = shard.log_slots;
    s.source.live = s.source.n = shard.rows;
    s.source.format = entry.format;
    s.source.row_bytes = StoredBytes(entry.format, entry.dim);
    if (!verify) {
      s.source.slots_file = s.slots.get();
      s.source.keys_file = s.keys.get();
      s.source.vectors_file = s.vectors.get();
    }
    made->size_ += shard.rows;
  }
  made->entry_.shards.clear();
  made->base_ = std::move(base);
  made->SetSources();
  *rows = std::move(made);
  return Status();
}

Status TableRows::WithDelta(Exec& exec, const Manifest& manifest, const TableEntry& entry,
                            std::shared_ptr<const TableRows>* rows) const {
  std::vector<char> keys, vectors, deleted;
  uint64_t live = 0;
  for (const ShardEntry& shard : entry.shards) {
    std::unique_ptr<VerifiedFile> file;
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "keys", true, &file));
    Append(&keys, file->data(), shard.rows * key_bytes());
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "vectors", true, &file));
    Append(&vectors, file->data(), shard.rows * StoredBytes(entry.format, entry.dim));
    DYNEMB_RETURN_IF_ERROR(OpenColumn(exec, manifest, shard, "deleted", true, &file));
    Append(&deleted, file->data(), shard.deleted * key_bytes());
    live += shard.rows;
  }
  auto made = std::make_shared<TableRows>(*this);
  if (!keys.empty() || !deleted.empty()) {
    Append(&keys, deleted.data(), deleted.size());
    std::shared_ptr<const Level> level;
    DYNEMB_RETURN_IF_ERROR(
        MakeLevel(std::move(keys), std::move(vectors), entry.format, live, &level));
    if (key_bytes() == 8 ? HasRepeatedKeys<uint64_t>(level->source)
                         : HasRepeatedKeys<uint32_t>(level->source)) {
      return DataLoss(manifest.directory + " is damaged: it has a key of table '" + entry.name +
                      "' twice");
    }
    DYNEMB_RETURN_IF_ERROR(key_bytes() == 8 ? CountChanges<uint64_t>(*level, &made->size_)
                                            : CountChanges<uint32_t>(*level, &made->size_));
    while (!made->levels_.empty() && made->levels_.back()->source.n < kGrowth * level->source.n) {
      std::shared_ptr<const Level> merged;
      DYNEMB_RETURN_IF_ERROR(Merge(*made->levels_.back(), *level, &merged));
      made->levels_.pop_back();
      level = std::move(merged);
    }
    if (made->levels_.empty() && level->source.n > level->source.live) {
      made->SetSources();
      DYNEMB_RETURN_IF_ERROR(key_bytes() == 8 ? made->DropNeedless<uint64_t>(&level)
                                              : made->DropNeedless<uint32_t>(&level));
    }
    made->levels_.push_back(std::move(level));
    made->SetSources();
  }
  *rows = std::move(made);
  return Status();
}

void TableRows::SetSources() {
  sources_.clear();
  for (size_t l = levels_.size(); l > 0; --l) sources_.push_back(levels_[l - 1]->source);
  for (const Shard& shard : base_->shards) sources_.push_back(shard.source);
}

template <class K>
Status TableRows::CountChanges(const Level& level, uint64_t* size) const {
  const bool sound = ForEach<K>(
      [&level](uint64_t i) { return LoadUnaligned<K>(level.source.keys + i * sizeof(K)); }, 0,
      level.source.n, /*reads=*/false,
      [&](uint64_t i, K, Place place) {
        const bool lives = i < level.source.live;
        if (lives && !place.has_row()) ++*size;
        if (!lives && place.has_row()) --*size;
      });
  return sound ? Status() : damage();
}

template <class K>
Status TableRows::DropNeedless(std::shared_ptr<const Level>* level) const {
  const RowSource& source = (*level)->source;
  std::vector<char> keys(source.keys, source.keys + source.live * sizeof(K));
  const bool sound =
      ForEach<K>([&source](uint64_t i) { return LoadUnaligned<K>(source.keys + i * sizeof(K)); },
                 source.live, source.n, /*reads=*/false,
                 [&](uint64_t, K key, Place place) {
                   if (place.has_row()) {
                     Append(&keys, reinterpret_cast<const char*>(&key), sizeof(K));
                   }
                 });
  if (!sound) return damage();
  return MakeLevel(std::move(keys), (*level)->vectors, source.format, source.live, level);
}

Status TableRows::MakeLevel(std::vector<char> keys, std::vector<char> vectors, VectorFormat format,
                            uint64_t live, std::shared_ptr<const Level>* level) const {
  auto made = std::make_shared<Level>();
  made->keys = std::move(keys);
  made->vectors = std::move(vectors);
  RowSource& source = made->source;
  source.n = made->keys.size() / key_bytes();
  source.live = live;
  source.format = format;
  source.row_bytes = StoredBytes(format, entry_.dim);
  while ((uint64_t{1} << source.log_slots) < 2 * source.n) ++source.log_slots;
  if (source.n >= 0xFFFFFFFF) {
    return InvalidArgument("the deltas of table '" + entry_.name + "' have " +
                           std::to_string(source.n) + " keys: dump it again");
  }
  made->slots.resize(size_t{1} << source.log_slots);
  source.salt =
      BuildKeyIndex(made->keys.data(), source.n, key_bytes(), source.log_slots, made->slots.data());
  source.slots = made->slots.data();
  source.keys = made->keys.data();
  source.vectors = made->vectors.data();
  *level = std::move(made);
  return Status();
}

void TableRows::AppendRows(const RowSource& from, uint64_t begin, uint64_t end, VectorFormat format,
                           std::vector<char>* rows) const {
  const char* const first = from.vectors + begin * from.row_bytes;
  if (format == from.format) return Append(rows, first, (end - begin) * from.row_bytes);
  const size_t bytes = StoredBytes(format, entry_.dim);
  size_t at = rows->size();
  rows->resize(at + (end - begin) * bytes);
  VectorBuffer vector(entry_.dim);
  for (uint64_t i = begin; i < end; ++i, at += bytes) {
    LoadStored(from.format, from.vectors + i * from.row_bytes, entry_.dim, vector.get());
    memcpy(rows->data() + at, vector.get(), bytes);
  }
}

template <class K>
void TableRows::AppendMissing(const Level& from, uint64_t begin, uint64_t end, const Level& lacks,
                              VectorFormat format, std::vector<char>* keys,
                              std::vector<char>* vectors) const {
  FindRows<1, K>(
      &lacks.source, 1,
      [&from](uint64_t i) { return LoadUnaligned<K>(from.keys.data() + i * sizeof(K)); }, begin,
      end, /*reads=*/false,
      [&](uint64_t i, K key, Place place) {
        if (place.is_known()) return;
        Append(keys, reinterpret_cast<const char*>(&key), sizeof(K));
        if (vectors != nullptr) AppendRows(from.source, i, i + 1, format, vectors);
      });
}

Status TableRows::Merge(const Level& older, const Level& newer,
                        std::shared_ptr<const Level>* merged) const {
  const VectorFormat format =
      older.source.format == newer.source.format ? newer.source.format : VectorFormat::kFloat32;
  const auto append = [&](uint64_t begin, uint64_t end, std::vector<char>* keys,
                          std::vector<char>* vectors) {
    if (key_bytes() == 8) {
      AppendMissing<uint64_t>(older, begin, end, newer, format, keys, vectors);
    } else {
      AppendMissing<uint32_t>(older, begin, end, newer, format, keys, vectors);
    }
  };
  std::vector<char> keys, vectors;
  append(0, older.source.live, &keys, &vectors);
  Append(&keys, newer.keys.data(), newer.source.live * key_bytes());
  AppendRows(newer.source, 0, newer.source.live, format, &vectors);
  const uint64_t live = keys.size() / key_bytes();
  append(older.source.live, older.source.n, &keys, nullptr);
  Append(&keys, newer.keys.data() + newer.source.live * key_bytes(),
         (newer.source.n - newer.source.live) * key_bytes());
  return MakeLevel(std::move(keys), std::move(vectors), format, live, merged);
}

uint64_t TableRows::slots() const {
  uint64_t slots = 0;
  for (const Shard& shard : base_->shards) slots += uint64_t{1} << shard.source.log_slots;
  for (const auto& level : levels_) slots += level->slots.size();
  return slots;
}

uint64_t TableRows::mapped_bytes() const {
  uint64_t bytes = 0;
  for (const Shard& shard : base_->shards) {
    bytes += shard.slots->bytes() + shard.keys->bytes() + shard.vectors->bytes();
  }
  return bytes;
}

uint64_t TableRows::level_bytes() const {
  uint64_t bytes = 0;
  for (const auto& level : levels_) {
    bytes += level->keys.size() + level->vectors.size() + level->slots.size() * sizeof(uint32_t);
  }
  return bytes;
}

Status TableRows::damage() const {
  for (const Shard& shard : base_->shards) {
    for (const VerifiedFile* file : {shard.slots.get(), shard.keys.get(), shard.vectors.get()}) {
      DYNEMB_RETURN_IF_ERROR(file->damage());
    }
  }
  // The checksums are right, and the contents contradict each other.
  return DataLoss("the index of table '" + entry_.name + "' is damaged");
}

}  // namespace dynemb
