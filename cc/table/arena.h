// Arena: one contiguous address range that is committed from the front as it fills. It costs
// nothing but the page faults of the part that is used.
//
// An arena that grows takes addresses as it needs them, twice as many each time: where the range
// cannot be extended in place, the system maps its pages at another address (mremap). Contents are
// not copied, but addresses into the arena end with the Commit that moves it. So a process can have
// thousands of arenas, none of which knows how large it will become.
//
// An arena that was reserved has its greatest size from the beginning, and never moves: for memory
// whose addresses are given away (page-locked memory of a GPU's driver).
#ifndef DYNEMB_TABLE_ARENA_H_
#define DYNEMB_TABLE_ARENA_H_

#include <cstddef>

#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  // Makes this an arena that never moves, of up to `bytes`; if the process may not reserve so much
  // address space, of the greatest power-of-two fraction of it that is granted, but
  // ResourceExhausted below `at_least`. Call once, before the first Commit.
  Status Reserve(size_t bytes, size_t at_least);

  // Makes the first `bytes` usable; what is newly usable reads as zero. An arena that was not
  // reserved may move. ResourceExhausted if `bytes` is more than was reserved, more than the
  // process may use (memory_limit.h), or refused by the system; the arena is then as it was.
  Status Commit(size_t bytes);

  // Faults in what of the first `bytes` (committed) has not been, each huge page by one thread.
  // Only for speed: threads that come upon a new huge page together all clear it, and all but one
  // in vain. Contents stay.
  void Prefault(Exec& exec, size_t bytes);

  // Makes what is behind the first `bytes` read as zero again, and gives its memory back. What is
  // committed stays so.
  void Discard(size_t bytes);
  void Clear() { Discard(0); }

  char* data() const { return data_; }
  size_t committed() const { return committed_; }
  // Bytes of addresses that it has.
  size_t reserved() const { return reserved_; }

 private:
  void Release();
  // Sets committed_, and charges for it.
  Status CommitTo(size_t target);
  // Has addresses for `bytes` from now on.
  Status Extend(size_t bytes);
  bool MoveTo(size_t bytes);
  void AdviseHugePages(size_t bytes);

  char* data_ = nullptr;
  bool fixed_ = false;  // was reserved
  size_t reserved_ = 0;
  size_t committed_ = 0;
  size_t advised_ = 0;    // bytes from the front for which huge pages were asked
  size_t prefaulted_ = 0;  // of these, those that Prefault has seen to
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ARENA_H_
