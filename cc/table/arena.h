// Arena: a contiguous address range that is committed from the front as it fills. Its only cost is
// the page faults of the memory that is used.
//
// A growing arena reserves addresses as it needs them, and doubles its range each time. If the
// range cannot be extended in place, the system maps its pages at another address (mremap).
// Contents are not copied, but addresses into the arena become invalid with the Commit that moves
// it. A process can therefore have thousands of arenas whose final sizes are unknown.
//
// A reserved arena has its maximal address range from the start, and never moves. It is for memory
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

  // Makes this an arena of up to `bytes` bytes that never moves. If the system refuses this much
  // address space, the arena gets the largest power-of-two fraction of it that is granted;
  // ResourceExhausted if that is less than `at_least`. Call once, before the first Commit.
  Status Reserve(size_t bytes, size_t at_least);

  // Makes the first `bytes` bytes usable; newly usable memory reads as zero. An arena that was not
  // reserved may move. ResourceExhausted if `bytes` is more than was reserved, more than the
  // process may use (memory_limit.h), or refused by the system; the arena is then unchanged.
  Status Commit(size_t bytes);

  // Faults in the huge pages of the first `bytes` bytes that are committed and have not been
  // faulted in, each by one thread. Does nothing for memory that is not in huge pages. Contents are
  // unchanged. This is only for speed: threads that access a new huge page at the same time all
  // clear it, and all except one do so in vain.
  void Prefault(Exec& exec, size_t bytes);

  // Makes the bytes after the first `bytes` read as zero again, and returns their memory to the
  // system. They stay committed.
  void Discard(size_t bytes);
  void Clear() { Discard(0); }

  char* data() const { return data_; }
  size_t committed() const { return committed_; }
  // The size of its address range.
  size_t reserved() const { return reserved_; }

 private:
  void Release();
  // Grows committed_ to `target`, or to the reserved size if that is less, and charges the memory.
  Status CommitTo(size_t target);
  // Extends the address range to at least `bytes`.
  Status Extend(size_t bytes);
  bool MoveTo(size_t bytes);
  void AdviseHugePages(size_t bytes);

  char* data_ = nullptr;
  bool fixed_ = false;  // was reserved
  size_t reserved_ = 0;
  size_t committed_ = 0;
  size_t advised_ = 0;     // bytes from the front that have been advised to be huge pages
  size_t prefaulted_ = 0;  // bytes of these that Prefault has faulted in
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ARENA_H_
