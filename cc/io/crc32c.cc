#include "cc/io/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace dynemb {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // 0x1EDC6F41 reflected

// t[k][b]: the register after byte b and k zero bytes, starting from a register of zero.
struct Tables {
  std::array<std::array<uint32_t, 256>, 8> t;
  Tables() {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t r = b;
      for (int bit = 0; bit < 8; ++bit) r = (r >> 1) ^ ((r & 1) != 0 ? kPolynomial : 0);
      t[0][b] = r;
    }
    for (size_t k = 1; k < 8; ++k) {
      for (size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xFF];
    }
  }
};

uint32_t ByTables(uint32_t r, const unsigned char* p, size_t n) {
  static const Tables* const tables = new Tables;
  const auto& t = tables->t;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    word ^= r;
    r = 0;
    for (size_t k = 0; k < 8; ++k) r ^= t[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; n > 0; --n, ++p) r = (r >> 8) ^ t[0][(r ^ *p) & 0xFF];
  return r;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t ByInstruction(uint32_t r, const unsigned char* p,
                                                         size_t n) {
  uint64_t wide = r;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  r = static_cast<uint32_t>(wide);
  for (; n > 0; --n, ++p) r = __builtin_ia32_crc32qi(r, *p);
  return r;
}
#endif

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t n) {
  const auto* p = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~ByInstruction(~crc, p, n);
#endif
  return ~ByTables(~crc, p, n);
}

uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t n) {
  return ~ByTables(~crc, static_cast<const unsigned char*>(data), n);
}

std::vector<uint32_t> Crc32cBlocks(Exec& exec, const void* data, size_t n, uint32_t initial,
                                   size_t room, size_t block) {
  const auto* p = static_cast<const char*>(data);
  const size_t first = std::min(n, room);
  const size_t rest = (n - first + block - 1) / block;
  std::vector<uint32_t> sums(1 + rest);
  exec.ParallelFor(1 + rest, 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i == 0) {
        sums[0] = Crc32c(initial, p, first);
      } else {
        const size_t at = first + (i - 1) * block;
        sums[i] = Crc32c(0, p + at, std::min(block, n - at));
      }
    }
  });
  return sums;
}

}  // namespace dynemb
