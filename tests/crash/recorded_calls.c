// The calls that recorder.c records.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

#include "recorder.h"

// --- Files that are opened

static int opened_at(int folder, const char* path, int flags, mode_t mode) {
  REAL(int, openat, int, const char*, int, ...);
  char name[PATH_MAX];
  const int is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  if ((flags & (O_CREAT | O_TRUNC)) == 0 && !is_unnamed) return real(folder, path, flags, mode);
  if (!resolve(folder, path, name)) return real(folder, path, flags, mode);
  pthread_mutex_lock(&recorder_lock);
  int file = -1;
  struct stat before, after;
  const int existed = fstatat(folder, path, &before, 0) == 0;
  if (existed || !fails(CREATE, 0, name, "")) {
    file = real(folder, path, flags, mode);
    if (file >= 0 && is_unnamed) {
      put_unknown("a file without a name", name);
    } else if (file >= 0 && fstat(file, &after) == 0) {
      if (!existed) {
        put(CREATE, 0, after.st_ino, 0, name, "", NULL, 0);
      } else if ((flags & O_TRUNC) != 0 && before.st_size != 0) {
        put(TRUNCATE, 0, after.st_ino, 0, name, "", NULL, 0);
      }
    }
  }
  pthread_mutex_unlock(&recorder_lock);
  return file;
}

static mode_t mode_of(int flags, va_list arguments) {
  const int has = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has ? va_arg(arguments, mode_t) : 0;
}

PUBLIC int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return opened_at(folder, path, flags, mode);
}

PUBLIC int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return opened_at(AT_FDCWD, path, flags, mode);
}

PUBLIC int creat(const char* path, mode_t mode) {
  return opened_at(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

PUBLIC int openat64(int folder, const char* path, int flags, ...) SAME_AS(openat);
PUBLIC int open64(const char* path, int flags, ...) SAME_AS(open);
PUBLIC int creat64(const char* path, mode_t mode) SAME_AS(creat);

PUBLIC FILE* fopen(const char* path, const char* mode) {
  REAL(FILE*, fopen, const char*, const char*);
  char name[PATH_MAX];
  if (strpbrk(mode, "wa+") != NULL && resolve(AT_FDCWD, path, name)) put_unknown("fopen", name);
  return real(path, mode);
}
PUBLIC FILE* fopen64(const char* path, const char* mode) SAME_AS(fopen);

// --- Contents

// Bytes that have been written; those of a call that has no buffer are read again.
static void put_bytes(int file, const struct stat* found, off_t offset, const void* data,
                      size_t n) {
  char* copy = NULL;
  if (data == NULL) {
    char name[64];
    snprintf(name, sizeof(name), "/proc/self/fd/%d", file);
    const int again = open(name, O_RDONLY | O_CLOEXEC);
    copy = malloc(n + 1);
    if (again < 0 || copy == NULL || pread(again, copy, n, offset) != (ssize_t)n) abort();
    close(again);
    data = copy;
  }
  put(WRITE, 0, found->st_ino, (uint64_t)offset, "", "", data, n);
  free(copy);
}

// The end of a call that writes: `call` gives the number of bytes, which are at the offset `at`, or
// before the file's position if it is -1.
#define WRITE_BY(file, call, at, data)                                             \
  struct stat found;                                                               \
  char path[PATH_MAX];                                                             \
  if (!is_ours(file, &found, path)) return call;                                   \
  pthread_mutex_lock(&recorder_lock);                                              \
  ssize_t n = -1;                                                                  \
  if (!fails(WRITE, found.st_ino, path, "")) {                                     \
    n = call;                                                                      \
    if (n > 0) {                                                                   \
      const off_t offset = (at) >= 0 ? (off_t)(at) : lseek(file, 0, SEEK_CUR) - n; \
      put_bytes(file, &found, offset, data, (size_t)n);                            \
    }                                                                              \
  }                                                                                \
  pthread_mutex_unlock(&recorder_lock);                                            \
  return n

PUBLIC ssize_t write(int file, const void* from, size_t bytes) {
  WRITE_BY(file, real_write(file, from, bytes), -1, from);
}

PUBLIC ssize_t pwrite(int file, const void* from, size_t bytes, off_t to) {
  REAL(ssize_t, pwrite, int, const void*, size_t, off_t);
  WRITE_BY(file, real(file, from, bytes, to), to, from);
}

PUBLIC ssize_t writev(int file, const struct iovec* parts, int count) {
  REAL(ssize_t, writev, int, const struct iovec*, int);
  WRITE_BY(file, real(file, parts, count), -1, NULL);
}

PUBLIC ssize_t pwritev(int file, const struct iovec* parts, int count, off_t to) {
  REAL(ssize_t, pwritev, int, const struct iovec*, int, off_t);
  WRITE_BY(file, real(file, parts, count, to), to, NULL);
}

PUBLIC ssize_t sendfile(int to, int from, off_t* at, size_t bytes) {
  REAL(ssize_t, sendfile, int, int, off_t*, size_t);
  WRITE_BY(to, real(to, from, at, bytes), -1, NULL);
}

PUBLIC ssize_t copy_file_range(int from, off_t* at, int to, off_t* to_at, size_t bytes,
                               unsigned flags) {
  REAL(ssize_t, copy_file_range, int, off_t*, int, off_t*, size_t, unsigned);
  const off_t where = to_at == NULL ? -1 : *to_at;
  WRITE_BY(to, real(from, at, to, to_at, bytes, flags), where, NULL);
}

PUBLIC ssize_t pwrite64(int file, const void* from, size_t n, off_t to) SAME_AS(pwrite);
PUBLIC ssize_t pwritev64(int f, const struct iovec* v, int n, off_t to) SAME_AS(pwritev);
PUBLIC ssize_t sendfile64(int to, int from, off_t* at, size_t n) SAME_AS(sendfile);

// The end of a call that changes the size; `failed` is what it returns if it fails as it was told.
#define RESIZE_BY(file, call, failed)                                              \
  struct stat found, after;                                                        \
  char path[PATH_MAX];                                                             \
  if (!is_ours(file, &found, path)) return call;                                   \
  pthread_mutex_lock(&recorder_lock);                                              \
  int result;                                                                      \
  if (fails(TRUNCATE, found.st_ino, path, "")) {                                   \
    result = failed;                                                               \
  } else {                                                                         \
    result = call;                                                                 \
    if (result == 0 && fstat(file, &after) == 0 && after.st_size != found.st_size) \
      put(TRUNCATE, 0, found.st_ino, (uint64_t)after.st_size, path, "", NULL, 0);  \
  }                                                                                \
  pthread_mutex_unlock(&recorder_lock);                                            \
  return result

PUBLIC int ftruncate(int file, off_t size) {
  REAL(int, ftruncate, int, off_t);
  RESIZE_BY(file, real(file, size), -1);
}

PUBLIC int posix_fallocate(int file, off_t at, off_t bytes) {
  REAL(int, posix_fallocate, int, off_t, off_t);
  RESIZE_BY(file, real(file, at, bytes), errno);
}

PUBLIC int fallocate(int file, int mode, off_t at, off_t bytes) {
  REAL(int, fallocate, int, int, off_t, off_t);
  if (recorder_trace >= 0 && (mode & ~FALLOC_FL_KEEP_SIZE) != 0)
    put_unknown("a hole in a file", "");
  RESIZE_BY(file, real(file, mode, at, bytes), -1);
}

PUBLIC int truncate(const char* path, off_t size) {
  REAL(int, truncate, const char*, off_t);
  char name[PATH_MAX];
  if (resolve(AT_FDCWD, path, name)) put_unknown("truncate", name);
  return real(path, size);
}

PUBLIC int ftruncate64(int file, off_t size) SAME_AS(ftruncate);
PUBLIC int posix_fallocate64(int file, off_t at, off_t bytes) SAME_AS(posix_fallocate);
PUBLIC int fallocate64(int file, int mode, off_t at, off_t bytes) SAME_AS(fallocate);
PUBLIC int truncate64(const char* path, off_t size) SAME_AS(truncate);

// Shared maps.
#define MOST_MAPS 64
static struct {
  void* at;
  int file;
  ino_t inode;
} maps[MOST_MAPS];

static void note_map(void* at, int access, int flags, int file) {
  struct stat found;
  char path[PATH_MAX];
  const int is_shared = (flags & MAP_TYPE) == MAP_SHARED || (flags & MAP_TYPE) == 0x03;
  if (!is_shared || (access & PROT_WRITE) == 0 || !is_ours(file, &found, path)) return;
  pthread_mutex_lock(&recorder_lock);
  size_t i = 0;
  while (i < MOST_MAPS && maps[i].at != NULL) ++i;
  if (i == MOST_MAPS) {
    put_unknown("too many maps", path);
  } else {
    maps[i].at = at;
    maps[i].file = fcntl(file, F_DUPFD_CLOEXEC, 0);
    maps[i].inode = found.st_ino;
  }
  pthread_mutex_unlock(&recorder_lock);
}

static void put_map(size_t i) {
  struct stat found;
  if (fstat(maps[i].file, &found) == 0 && found.st_size > 0)
    put_bytes(maps[i].file, &found, 0, NULL, (size_t)found.st_size);
}

PUBLIC void* mmap(void* where, size_t bytes, int access, int flags, int file, off_t at) {
  REAL(void*, mmap, void*, size_t, int, int, int, off_t);
  void* const got = real(where, bytes, access, flags, file, at);
  if (recorder_trace >= 0 && file >= 0 && got != MAP_FAILED) note_map(got, access, flags, file);
  return got;
}
PUBLIC void* mmap64(void* to, size_t n, int access, int flags, int f, off_t at) SAME_AS(mmap);

PUBLIC int munmap(void* at, size_t bytes) {
  REAL(int, munmap, void*, size_t);
  if (recorder_trace < 0) return real(at, bytes);
  pthread_mutex_lock(&recorder_lock);
  for (size_t i = 0; i < MOST_MAPS; ++i) {
    if (maps[i].at != at || at == NULL) continue;
    put_map(i);
    close(maps[i].file);
    maps[i].at = NULL;
  }
  const int result = real(at, bytes);
  pthread_mutex_unlock(&recorder_lock);
  return result;
}

// --- Syncs

static int synced(int file, int (*real)(int)) {
  struct stat found;
  char path[PATH_MAX];
  if (!is_ours(file, &found, path)) return real(file);
  pthread_mutex_lock(&recorder_lock);
  for (size_t i = 0; i < MOST_MAPS; ++i) {
    if (maps[i].at != NULL && maps[i].inode == found.st_ino) put_map(i);
  }
  int result = -1;
  if (!fails(SYNC, found.st_ino, path, "")) {
    result = real(file);
    if (result == 0) put(SYNC, 0, found.st_ino, 0, path, "", NULL, 0);
  }
  pthread_mutex_unlock(&recorder_lock);
  return result;
}

PUBLIC int fsync(int file) {
  REAL(int, fsync, int);
  return synced(file, real);
}

PUBLIC int fdatasync(int file) {
  REAL(int, fdatasync, int);
  return synced(file, real);
}

// --- Names

// The end of a call that changes a name.
#define NAME_BY(kind, folder, path, call)                \
  char name[PATH_MAX];                                   \
  if (!resolve(folder, path, name)) return call;         \
  pthread_mutex_lock(&recorder_lock);                    \
  int result = -1;                                       \
  if (!fails(kind, 0, name, "")) {                       \
    result = call;                                       \
    if (result == 0) put_name(kind, folder, path, name); \
  }                                                      \
  pthread_mutex_unlock(&recorder_lock);                  \
  return result

static void put_name(uint32_t kind, int folder, const char* path, const char* name) {
  struct stat found = {0};
  if (kind == MKDIR && fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) != 0) abort();
  put(kind, 0, found.st_ino, 0, name, "", NULL, 0);
}

PUBLIC int mkdir(const char* path, mode_t mode) {
  REAL(int, mkdir, const char*, mode_t);
  NAME_BY(MKDIR, AT_FDCWD, path, real(path, mode));
}

PUBLIC int mkdirat(int folder, const char* path, mode_t mode) {
  REAL(int, mkdirat, int, const char*, mode_t);
  NAME_BY(MKDIR, folder, path, real(folder, path, mode));
}

PUBLIC int unlinkat(int folder, const char* path, int flags) {
  REAL(int, unlinkat, int, const char*, int);
  const uint32_t kind = (flags & AT_REMOVEDIR) != 0 ? RMDIR : UNLINK;
  NAME_BY(kind, folder, path, real(folder, path, flags));
}

PUBLIC int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }

PUBLIC int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

PUBLIC int remove(const char* path) {
  struct stat found;
  return lstat(path, &found) == 0 && S_ISDIR(found.st_mode) ? rmdir(path) : unlink(path);
}

// The end of a call with two names, of which at least one is in the folder.
#define NAME_TWICE_BY(kind, from_folder, from, to_folder, to, call)           \
  char name[PATH_MAX] = "", other[PATH_MAX] = "";                             \
  const int of_from = resolve(from_folder, from, name);                       \
  const int of_to = resolve(to_folder, to, other);                            \
  if (!of_from && !of_to) return call;                                        \
  pthread_mutex_lock(&recorder_lock);                                         \
  int result = -1;                                                            \
  if (of_from != of_to) put_unknown("a name from or to another place", from); \
  if (!fails(kind, 0, name, other)) {                                         \
    result = call;                                                            \
    if (result == 0) put(kind, 0, 0, 0, name, other, NULL, 0);                \
  }                                                                           \
  pthread_mutex_unlock(&recorder_lock);                                       \
  return result

PUBLIC int renameat2(int old_folder, const char* old, int folder, const char* path,
                     unsigned flags) {
  REAL(int, renameat2, int, const char*, int, const char*, unsigned);
  if (recorder_trace >= 0 && (flags & RENAME_EXCHANGE) != 0)
    put_unknown("an exchange of names", old);
  NAME_TWICE_BY(RENAME, old_folder, old, folder, path, real(old_folder, old, folder, path, flags));
}

PUBLIC int renameat(int old_folder, const char* old, int folder, const char* path) {
  return renameat2(old_folder, old, folder, path, 0);
}

PUBLIC int rename(const char* old, const char* path) {
  return renameat2(AT_FDCWD, old, AT_FDCWD, path, 0);
}

PUBLIC int linkat(int old_folder, const char* old, int folder, const char* path, int flags) {
  REAL(int, linkat, int, const char*, int, const char*, int);
  NAME_TWICE_BY(LINK, old_folder, old, folder, path, real(old_folder, old, folder, path, flags));
}

PUBLIC int link(const char* old, const char* path) {
  return linkat(AT_FDCWD, old, AT_FDCWD, path, 0);
}

PUBLIC int symlink(const char* to, const char* path) {
  REAL(int, symlink, const char*, const char*);
  char name[PATH_MAX];
  if (resolve(AT_FDCWD, path, name)) put_unknown("symlink", name);
  return real(to, path);
}
