// TableRows: the rows of one table as of one snapshot: the shards of a base, mapped, and levels of
// changes over them, in memory.
//
// Immutable, so that any number of threads may read it without a lock. WithDelta returns the rows
// after a delta; both share what did not change.
//
// Levels. A level has the rows and the deleted keys of one or more deltas. It is newer than all
// levels before it. A new level is merged with those before it that are less than kGrowth times as
// large, so that a key is looked up in few levels and copied few times, for any number and size of
// deltas (tf_dynemb/serving/overlay.py does the same).
#ifndef DYNEMB_SERVING_TABLE_ROWS_H_
#define DYNEMB_SERVING_TABLE_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/io/manifest.h"
#include "cc/serving/row_source.h"
#include "cc/serving/verified_file.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

class TableRows {
 public:
  // Maps the files of a table of a base. `verify`: all of their blocks are verified now; otherwise
  // each one before its first use. Errors name the file.
  static Status OfBase(Exec& exec, const Manifest& manifest, const TableEntry& entry, bool verify,
                       std::shared_ptr<const TableRows>* rows);
  // The rows after a delta, all of whose files are verified and copied into memory.
  Status WithDelta(Exec& exec, const Manifest& manifest, const TableEntry& entry,
                   std::shared_ptr<const TableRows>* rows) const;

  const TableEntry& entry() const { return entry_; }
  size_t key_bytes() const { return SizeOf(entry_.key_type); }
  size_t vector_bytes() const { return static_cast<size_t>(entry_.dim) * SizeOf(entry_.dtype); }

  // The number of keys; the slots of all indexes; bytes of mapped files, and of the levels.
  uint64_t size() const { return size_; }
  uint64_t slots() const;
  uint64_t mapped_bytes() const;
  uint64_t level_bytes() const;

  // Sets places[i] to the address of the vector of keys[i], or to kUnknown if it has no row, for
  // i < n <= kFindBlock. Returns false if a file is damaged; places are then undefined. `reads`:
  // whether the caller reads the vectors; otherwise their blocks are not verified.
  template <class K>
  bool Find(const K* keys, size_t n, Place* places, bool reads = true) const;

  // The error after Find has returned false.
  Status damage() const;

 private:
  struct Level {
    std::vector<char> keys;  // of rows, then deleted keys
    std::vector<char> vectors;
    std::vector<uint32_t> slots;
    RowSource source;
  };
  struct Shard {
    std::unique_ptr<VerifiedFile> slots, keys, vectors;
    RowSource source;
  };
  struct Base {
    std::vector<Shard> shards;
  };

  // A level of these rows and deleted keys. InvalidArgument if they are too many for an index.
  Status MakeLevel(std::vector<char> keys, std::vector<char> vectors, uint64_t live,
                   std::shared_ptr<const Level>* level) const;
  Status Merge(const Level& older, const Level& newer, std::shared_ptr<const Level>* merged) const;
  // Appends the keys [begin, end) of `from` that `lacks` does not have, and their vectors if
  // `vectors` is not null.
  template <class K>
  void AppendMissing(const Level& from, uint64_t begin, uint64_t end, const Level& lacks,
                     std::vector<char>* keys, std::vector<char>* vectors) const;
  template <class K>
  Status CountChanges(const Level& level, uint64_t* size) const;
  // Removes the deleted keys of the lowest level that the base does not have.
  template <class K>
  Status DropNeedless(std::shared_ptr<const Level>* level) const;

  TableEntry entry_;
  std::shared_ptr<const Base> base_;
  std::vector<std::shared_ptr<const Level>> levels_;  // the oldest first
  uint64_t size_ = 0;
};

template <class K>
bool TableRows::Find(const K* keys, size_t n, Place* places, bool reads) const {
  uint32_t pending[kFindBlock];
  for (size_t i = 0; i < n; ++i) {
    pending[i] = static_cast<uint32_t>(i);
    places[i] = kUnknown;
  }
  bool sound = true;
  size_t left = n;
  for (size_t l = levels_.size(); l > 0 && left > 0; --l) {
    left = FindIn(levels_[l - 1]->source, keys, pending, left, places, &sound, reads);
  }
  for (size_t s = 0; s < base_->shards.size() && left > 0; ++s) {
    left = FindIn(base_->shards[s].source, keys, pending, left, places, &sound, reads);
  }
  if (!levels_.empty()) {
    for (size_t i = 0; i < n; ++i) {
      if (places[i] == kDeleted) places[i] = kUnknown;
    }
  }
  return sound;
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_TABLE_ROWS_H_
