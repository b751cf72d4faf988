// TableRows: the rows of one table as of one snapshot: the shards of a base, mapped, and levels of
// changes over them, in memory.
//
// Immutable, so that any number of threads may read it without a lock. WithDelta returns the rows
// after a delta; both share what did not change.
//
// Levels. A level has the rows and the deleted keys of one or more deltas. It is newer than all
// levels before it. A new level is merged with earlier levels that are less than kGrowth times as
// large, so that a key is looked up in few levels and copied few times, for any number and size of
// deltas (tf_dynemb/serving/overlay.py does the same). If two levels have rows of different
// formats, what they are merged to has rows of float32.
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
  // The levels, the newest first, then the shards of the base. The arrays of a source that a later
  // TableRows still has are at the same addresses.
  const std::vector<RowSource>& sources() const { return sources_; }
  size_t num_levels() const { return levels_.size(); }
  size_t key_bytes() const { return SizeOf(entry_.key_type); }

  // The number of keys; the slots of all indexes; bytes of mapped files, and of the levels.
  uint64_t size() const { return size_; }
  uint64_t slots() const;
  uint64_t mapped_bytes() const;
  uint64_t level_bytes() const;

  // Calls visit(i, key, place) for each i in [begin, end), in order, where key = key_at(i), and the
  // place has a row if the key has one. Returns false if a file is damaged; later keys are not
  // visited then. `reads`: whether the visitor reads the vectors; otherwise their blocks are not
  // verified.
  template <class K, class KeyAt, class Visit>
  bool ForEach(const KeyAt& key_at, size_t begin, size_t end, bool reads, const Visit& visit) const;

  // The error after ForEach has returned false.
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
  Status MakeLevel(std::vector<char> keys, std::vector<char> vectors, VectorFormat format,
                   uint64_t live, std::shared_ptr<const Level>* level) const;
  Status Merge(const Level& older, const Level& newer, std::shared_ptr<const Level>* merged) const;
  // Appends the keys [begin, end) of `from` that `lacks` does not have, and their vectors in a
  // format if `vectors` is not null.
  template <class K>
  void AppendMissing(const Level& from, uint64_t begin, uint64_t end, const Level& lacks,
                     VectorFormat format, std::vector<char>* keys,
                     std::vector<char>* vectors) const;
  // Appends the rows [begin, end) of `from` in a format.
  void AppendRows(const RowSource& from, uint64_t begin, uint64_t end, VectorFormat format,
                  std::vector<char>* rows) const;
  template <class K>
  Status CountChanges(const Level& level, uint64_t* size) const;
  // Removes the deleted keys of the lowest level that the base does not have.
  template <class K>
  Status DropNeedless(std::shared_ptr<const Level>* level) const;

  void SetSources();

  TableEntry entry_;
  std::shared_ptr<const Base> base_;
  std::vector<std::shared_ptr<const Level>> levels_;  // the oldest first
  std::vector<RowSource> sources_;  // of the levels, the newest first, then of the shards
  uint64_t size_ = 0;
};

template <class K, class KeyAt, class Visit>
bool TableRows::ForEach(const KeyAt& key_at, size_t begin, size_t end, bool reads,
                        const Visit& visit) const {
  const RowSource* const sources = sources_.data();
  if (levels_.empty() && sources_.size() == 1) {
    return FindRows<1, K>(sources, 1, key_at, begin, end, reads, visit);
  }
  return FindRows<0, K>(sources, sources_.size(), key_at, begin, end, reads, visit);
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_TABLE_ROWS_H_
