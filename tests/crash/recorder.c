// Records the changes that a process makes to the files of one folder, for replay.py. Preloaded
// (LD_PRELOAD); records between recorder_start and recorder_stop, which the process finds with
// dlsym, and in the processes that it forks meanwhile.
//
// The trace is a sequence of records: struct record, two texts, the bytes of a write. Each
// is one write to a file that was opened with O_APPEND, so that processes may share a
// trace. A lock is held during a call and its record: their order is that of the calls.
//
// What cannot be followed is recorded as UNKNOWN, which fails the test: fopen for writing (stdio
// calls the kernel from within the C library, where nothing can be intercepted), files without a
// name, exchanges. A call that is missing here altogether is found by the comparison of the
// replayed trace with the folder.
//
// Stores to shared maps are recorded as writes of the whole file, before it is synced or unmapped.
#include "recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct record {
  uint32_t kind;
  int32_t error;  // of a call that fails as it was told to; it has changed nothing
  uint64_t inode;
  uint64_t offset;
  uint32_t path_bytes, other_bytes;
  uint64_t data_bytes;
};

pthread_mutex_t recorder_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[PATH_MAX];
static size_t root_bytes;
static dev_t root_device;
volatile int recorder_trace = -1;

// What goes wrong: the call number `fail_at` of a kind, on a path that matches.
static uint32_t fail_kind;
static char fail_path[256];
static int fail_at, fail_error;
// The number of further records after which the process is killed.
static long kill_after = -1;

static void before_fork(void) { pthread_mutex_lock(&recorder_lock); }
static void after_fork(void) { pthread_mutex_unlock(&recorder_lock); }
// The child is another thread than the one that holds the lock.
static void in_child(void) {
  const pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
  recorder_lock = fresh;
}

ssize_t real_write(int file, const void* from, size_t n) {
  REAL(ssize_t, write, int, const void*, size_t);
  return real(file, from, n);
}

void put(uint32_t kind, int error, uint64_t inode, uint64_t offset, const char* path,
         const char* other, const void* data, size_t bytes) {
  const int saved = errno;
  struct record head = {kind, error, inode, offset, (uint32_t)strlen(path), (uint32_t)strlen(other),
                        bytes};
  const size_t all = sizeof(head) + head.path_bytes + head.other_bytes + bytes;
  char* const out = malloc(all);
  if (out == NULL) abort();
  char* to = mempcpy(out, &head, sizeof(head));
  to = mempcpy(to, path, head.path_bytes);
  to = mempcpy(to, other, head.other_bytes);
  if (bytes != 0) memcpy(to, data, bytes);
  if (real_write(recorder_trace, out, all) != (ssize_t)all) abort();
  free(out);
  if (kill_after >= 0 && kind != MARK && kill_after-- == 0) kill(getpid(), SIGKILL);
  errno = saved;
}

void put_unknown(const char* what, const char* path) { put(UNKNOWN, 0, 0, 0, what, path, NULL, 0); }

// --- Control

PUBLIC int recorder_start(const char* folder, const char* file) {
  struct stat found;
  if (realpath(folder, root) == NULL || stat(root, &found) != 0) return -1;
  root_bytes = strlen(root);
  root_device = found.st_dev;
  recorder_trace = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  pthread_atfork(before_fork, after_fork, in_child);
  return recorder_trace < 0 ? -1 : 0;
}

PUBLIC void recorder_stop(void) { recorder_trace = -1; }

PUBLIC void recorder_mark(const char* text) {
  pthread_mutex_lock(&recorder_lock);
  if (recorder_trace >= 0) put(MARK, 0, 0, 0, text, "", NULL, 0);
  pthread_mutex_unlock(&recorder_lock);
}

// The n-th call (from 1) of a kind, on a path that matches `path` (fnmatch), fails.
PUBLIC void recorder_fail(uint32_t kind, const char* path, int n, int error) {
  pthread_mutex_lock(&recorder_lock);
  fail_kind = kind;
  snprintf(fail_path, sizeof(fail_path), "%s", path);
  fail_at = n;
  fail_error = error;
  pthread_mutex_unlock(&recorder_lock);
}

// Whether the call that should fail has not come.
PUBLIC int recorder_waits(void) { return fail_at > 0; }

// Kills the process when it has made n more changes.
PUBLIC void recorder_kill(long n) { kill_after = n; }

int fails(uint32_t kind, uint64_t inode, const char* path, const char* other) {
  if (fail_at <= 0 || fail_kind != kind) return 0;
  if (fnmatch(fail_path, path, 0) != 0 && fnmatch(fail_path, other, 0) != 0) return 0;
  if (--fail_at != 0) return 0;
  put(kind, fail_error, inode, 0, path, other, NULL, 0);
  errno = fail_error;
  return 1;
}

// --- Paths

// Whether an absolute path is in the folder; sets it to the part after the folder's name.
static int inside(char* path) {
  if (strncmp(path, root, root_bytes) != 0) return 0;
  if (path[root_bytes] != '\0' && path[root_bytes] != '/') return 0;
  memmove(path, path + root_bytes, strlen(path + root_bytes) + 1);
  return 1;
}

static int path_of(int file, char* to) {
  char name[64];
  snprintf(name, sizeof(name), "/proc/self/fd/%d", file);
  const ssize_t n = readlink(name, to, PATH_MAX - 1);
  if (n < 0) return 0;
  to[n] = '\0';
  return inside(to);
}

// Whether a path that a call names is in the folder; its part after the folder's name. Links in
// the names of folders are followed, the last name is kept.
int resolve(int folder, const char* path, char* to) {
  if (recorder_trace < 0 || path == NULL) return 0;
  const int saved = errno;
  char parent[PATH_MAX];
  if (strlen(path) >= PATH_MAX) return 0;
  strcpy(parent, path);
  size_t n = strlen(parent);
  while (n > 1 && parent[n - 1] == '/') parent[--n] = '\0';
  char* const slash = strrchr(parent, '/');
  char name[NAME_MAX + 1];
  const char* const last = slash == NULL ? parent : slash + 1;
  if (strlen(last) > NAME_MAX) return 0;
  strcpy(name, last);
  if (slash == NULL) {
    strcpy(parent, ".");
  } else {
    slash[slash == parent] = '\0';
  }
  REAL(int, openat, int, const char*, int, ...);
  const int opened = real(folder, parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  int found = 0;
  if (opened >= 0) {
    char of_file[64];
    snprintf(of_file, sizeof(of_file), "/proc/self/fd/%d", opened);
    const ssize_t length = readlink(of_file, to, PATH_MAX - 1);
    if (length > 0 && (size_t)length + strlen(name) + 2 < PATH_MAX) {
      to[length] = '\0';
      if (length > 1) strcat(to, "/");
      strcat(to, name);
      found = inside(to);
    }
    close(opened);
  }
  errno = saved;
  return found;
}

// Whether a descriptor is of a file in the folder.
int is_ours(int file, struct stat* found, char* path) {
  if (recorder_trace < 0) return 0;
  const int saved = errno;
  const int ours = fstat(file, found) == 0 && found->st_dev == root_device && path_of(file, path);
  errno = saved;
  return ours;
}
