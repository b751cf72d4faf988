#include "cc/table/memory_limit.h"

#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <sstream>

namespace dynemb {
namespace {

constexpr size_t kUnlimited = SIZE_MAX;

std::atomic<size_t> charged{0};
// Charges up to this total are granted without reading the system's limits.
std::atomic<size_t> last_limit{0};
std::atomic<bool (*)(size_t)> fault{nullptr};

size_t MachineMemory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(page)
                               : size_t{16} << 30;
}

size_t Swap() {
  struct sysinfo info;
  return sysinfo(&info) == 0 ? static_cast<size_t>(info.totalswap) * info.mem_unit : 0;
}

// The number in a file; kUnlimited if there is no such file, or no number ("max").
size_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  file.imbue(std::locale::classic());
  size_t number;
  return file >> number ? number : kUnlimited;
}

// The least of the numbers in `file` of the group and all its ancestors. A group that is not below
// `mount` belongs to another namespace; `mount` itself is then the container's own group.
size_t LeastAbove(const std::string& mount, std::string group, const std::string& file) {
  size_t least = NumberIn(mount + "/" + file);
  while (group.size() > 1) {
    least = std::min(least, NumberIn(mount + group + "/" + file));
    group.resize(group.rfind('/'));
  }
  return least;
}

}  // namespace

size_t ControlGroupLimit(const std::string& root) {
  size_t least = kUnlimited;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // number:controllers:path; version 2 has the number 0 and no controllers.
    std::istringstream fields(line);
    std::string number, controllers, group;
    if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':') ||
        !std::getline(fields, group) || group.empty() || group[0] != '/') {
      continue;
    }
    if (controllers.empty()) {
      least = std::min(least, LeastAbove(root + "/sys/fs/cgroup", group, "memory.max"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      least = std::min(least,
                       LeastAbove(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return least;
}

size_t PhysicalMemory() { return std::min(MachineMemory(), ControlGroupLimit()); }

bool ChargeMemory(size_t bytes) {
  if (auto* may_charge = fault.load(std::memory_order_acquire)) {
    if (!may_charge(bytes)) return false;
  }
  // Relaxed: the account is only a count; it does not publish memory.
  size_t had = charged.load(std::memory_order_relaxed);
  do {
    if (bytes > kUnlimited - had) return false;
    if (had + bytes > last_limit.load(std::memory_order_relaxed)) {
      // The limits of a container may change while it runs.
      last_limit.store(PhysicalMemory() + Swap(), std::memory_order_relaxed);
      if (had + bytes > last_limit.load(std::memory_order_relaxed)) return false;
    }
  } while (!charged.compare_exchange_weak(had, had + bytes, std::memory_order_relaxed));
  return true;
}

void DischargeMemory(size_t bytes) { charged.fetch_sub(bytes, std::memory_order_relaxed); }

size_t ChargedMemory() { return charged.load(std::memory_order_relaxed); }

void SetMemoryFault(bool (*may_charge)(size_t bytes)) {
  fault.store(may_charge, std::memory_order_release);
}

}  // namespace dynemb
