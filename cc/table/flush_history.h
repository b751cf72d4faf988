// FlushHistory: the flushes (cold_rows.h) that a table may continue from after a restart, and the
// keys that it has forgotten since each of them.
//
// A flush is written, and later kept or not: with several ranks, it is kept if all of them could
// write theirs. Until then a restart may find it, or the one before. So what is forgotten meanwhile
// is noted in both.
#ifndef DYNEMB_TABLE_FLUSH_HISTORY_H_
#define DYNEMB_TABLE_FLUSH_HISTORY_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/function_ref.h"
#include "cc/table/status.h"

namespace dynemb {

class FlushHistory {
 public:
  // Whether there is any.
  bool any() const { return !last_.folder.empty() || !written_.folder.empty(); }
  // A flush was written to a folder, or perhaps. One that was written before, and not kept, is none
  // anymore.
  void Written(const std::string& folder) { written_ = {folder, {}}; }
  // The last flush is the one in this folder; empty: there is none. A flush that was written to
  // another folder is none anymore.
  void Keep(const std::string& folder) {
    if (folder == written_.folder) last_ = std::move(written_);
    if (folder != last_.folder) last_ = {folder, {}};
    written_ = {};
  }
  // The last flush is the one in this folder, from which the table continues. These keys, sorted,
  // were forgotten after it.
  void Continue(const std::string& folder, std::vector<uint64_t> forgotten) {
    last_ = {folder, std::move(forgotten)};
    written_ = {};
  }
  // The table forgets keys, sorted and distinct: calls note(folder, keys) with all keys that it has
  // forgotten since each flush. After an error, they are noted in some flushes.
  using NoteFn = FunctionRef<Status(const std::string& folder, const std::vector<uint64_t>& keys)>;
  Status Forget(const std::vector<uint64_t>& keys, const NoteFn& note) {
    for (Flush* flush : {&last_, &written_}) {
      if (flush->folder.empty()) continue;
      std::vector<uint64_t> all;
      std::set_union(flush->forgotten.begin(), flush->forgotten.end(), keys.begin(), keys.end(),
                     std::back_inserter(all));
      if (all.size() == flush->forgotten.size()) continue;
      DYNEMB_RETURN_IF_ERROR(note(flush->folder, all));
      flush->forgotten = std::move(all);
    }
    return Status();
  }

 private:
  struct Flush {
    std::string folder;  // empty: there is none
    std::vector<uint64_t> forgotten;
  };
  Flush last_, written_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FLUSH_HISTORY_H_
