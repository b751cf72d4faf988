// How much memory this process may use, and how much of it the tables have taken.
//
// A container's limit counts as the machine's memory: a process that goes beyond it is killed,
// where an error would have left the tables as they were. So arenas charge what they commit to one
// account of the process, and a charge that cannot fit into memory and swap is refused.
#ifndef DYNEMB_TABLE_MEMORY_LIMIT_H_
#define DYNEMB_TABLE_MEMORY_LIMIT_H_

#include <cstddef>
#include <string>

namespace dynemb {

// Bytes of memory that this process may use: those of the machine, or fewer where a control group
// (version 1 or 2) that it is in says so.
size_t PhysicalMemory();

// The least of the limits of the control groups of this process and of those around them; SIZE_MAX
// if there is none. `root` stands before /proc and /sys, for tests.
size_t ControlGroupLimit(const std::string& root = "");

// Takes `bytes` from the account of the process; false, and nothing is taken, if they exceed
// PhysicalMemory and swap together. Thread-safe.
bool ChargeMemory(size_t bytes);
void DischargeMemory(size_t bytes);
// What is charged now.
size_t ChargedMemory();

// For tests: while it is set, ChargeMemory asks `may_charge` first. Null removes it.
void SetMemoryFault(bool (*may_charge)(size_t bytes));

}  // namespace dynemb

#endif  // DYNEMB_TABLE_MEMORY_LIMIT_H_
