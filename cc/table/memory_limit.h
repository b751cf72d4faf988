// The memory that this process may use, and the account of the memory that its tables have
// committed.
//
// Arenas charge the memory that they commit to one account per process. A charge that exceeds
// memory and swap together is refused; the tables are then unchanged, whereas the system would kill
// a process that exceeds its limit. The limit of a container counts as the machine's memory.
#ifndef DYNEMB_TABLE_MEMORY_LIMIT_H_
#define DYNEMB_TABLE_MEMORY_LIMIT_H_

#include <cstddef>
#include <string>

namespace dynemb {

// The bytes of memory that this process may use: the machine's memory, or the limit of its control
// group (version 1 or 2) if that is less.
size_t PhysicalMemory();

// The least limit of the control groups of this process and their ancestors; SIZE_MAX if there is
// none. `root` is a prefix of /proc and /sys, for tests.
size_t ControlGroupLimit(const std::string& root = "");

// Charges `bytes` to the account. Returns false, and charges nothing, if the account would exceed
// PhysicalMemory and swap together. Thread-safe.
bool ChargeMemory(size_t bytes);
void DischargeMemory(size_t bytes);
// The bytes that are charged now.
size_t ChargedMemory();

// For tests: ChargeMemory calls `may_charge` first, and refuses the charge if that returns false.
// Null removes it.
void SetMemoryFault(bool (*may_charge)(size_t bytes));

}  // namespace dynemb

#endif  // DYNEMB_TABLE_MEMORY_LIMIT_H_
