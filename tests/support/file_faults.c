// Faults in file operations, for tests that preload this library (LD_PRELOAD) into a run.
//
// file_faults(directory, match, at, action, trace) selects the operations below a directory. An
// operation is a line such as "rename FROM TO", "fsync PATH", "create PATH", "write PATH" (a file
// that exists is opened for writing), "unlink PATH", "mkdir PATH" or "rmdir PATH", with paths
// relative to the directory. Operations whose line matches the pattern `match` are counted. Before number `at`
// is executed, the process kills itself (action 0), or the operation fails with errno = action.
// If `trace` is set, all operations are appended to TRACE/operations, and for each fsync of a file,
// its content is copied to TRACE/<line number>.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char directory[PATH_MAX], match[256], trace[PATH_MAX];
static long target, count, line_number;
static int action, is_armed;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void file_faults(const char *dir, const char *pattern, long at, int kind, const char *out) {
  snprintf(directory, sizeof directory, "%s/", dir);
  snprintf(match, sizeof match, "%s", pattern);
  snprintf(trace, sizeof trace, "%s", out);
  target = at, action = kind, count = line_number = 0, is_armed = 1;
}

long file_faults_count(void) { return count; }

// Writes the path relative to the watched directory to `out`. Returns 0 if it is elsewhere.
static int relative(int dirfd, const char *path, char *out) {
  char base[PATH_MAX] = "", link[64];
  if (path[0] != '/') {
    if (dirfd == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
      ssize_t length = readlink(link, base, sizeof base - 1);
      if (length < 0) return 0;
      base[length] = 0;
    }
    strncat(base, "/", sizeof base - strlen(base) - 1);
  }
  char full[2 * PATH_MAX];
  snprintf(full, sizeof full, "%s%s", base, path);
  size_t length = strlen(directory);
  if (strncmp(full, directory, length) && strncmp(full, directory, length - 1)) return 0;
  if (full[length - 1] != '/' && full[length - 1] != 0) return 0;
  snprintf(out, PATH_MAX, "%s", full[length - 1] && full[length] ? full + length : ".");
  return 1;
}

static void record(const char *line, int fd) {
  char path[PATH_MAX + 32], buffer[65536];
  snprintf(path, sizeof path, "%s/operations", trace);
  int log = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_APPEND | O_WRONLY, 0600);
  dprintf(log, "%s\n", line);
  syscall(SYS_close, log);
  struct stat status;
  if (fd >= 0 && !fstat(fd, &status) && S_ISREG(status.st_mode)) {
    char source[64];
    snprintf(source, sizeof source, "/proc/self/fd/%d", fd);
    int from = syscall(SYS_openat, AT_FDCWD, source, O_RDONLY);
    snprintf(path, sizeof path, "%s/%ld", trace, line_number);
    int to = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    ssize_t size;
    while ((size = read(from, buffer, sizeof buffer)) > 0)
      if (write(to, buffer, size) != size) abort();
    syscall(SYS_close, from), syscall(SYS_close, to);
  }
  line_number++;
}

// Counts and records an operation. Returns the errno with which it must fail, or 0.
static int operation(const char *name, int dirfd, const char *path, int dirfd2, const char *path2, int fd) {
  char first[PATH_MAX], second[PATH_MAX] = "", line[2 * PATH_MAX + 32];
  int saved = errno, result = 0;
  if (!is_armed || !relative(dirfd, path, first)) return 0;
  if (path2 && !relative(dirfd2, path2, second)) snprintf(second, sizeof second, "(elsewhere)");
  snprintf(line, sizeof line, "%s %s%s%s", name, first, path2 ? "\t" : "", second);
  pthread_mutex_lock(&mutex);
  if (!fnmatch(match, line, 0) && ++count == target) {
    if (!action) kill(getpid(), SIGKILL), pause();
    result = action;
  }
  if (!result && trace[0]) record(line, fd);
  pthread_mutex_unlock(&mutex);
  errno = result ? result : saved;
  return result;
}

#define ORIGINAL(type, name) static type (*original)(); if (!original) original = dlsym(RTLD_NEXT, #name)

static int opening(int dirfd, const char *path, int writes, int creates, int truncates) {
  if (!writes) return 0;
  struct stat status;
  int exists = !fstatat(dirfd, path, &status, 0);
  if (exists && !S_ISREG(status.st_mode)) return 0;
  return operation((creates && !exists) || (exists && truncates) ? "create" : "write", dirfd, path, 0, NULL, -1);
}

#define OPEN(name)                                                                        \
  int name(const char *path, int flags, ...) {                                            \
    ORIGINAL(int, name);                                                                  \
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list);      \
    if (opening(AT_FDCWD, path, (flags & O_ACCMODE) != O_RDONLY, flags & O_CREAT, flags & O_TRUNC)) return -1; \
    return original(path, flags, mode);                                                   \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                      \
  int name(int dirfd, const char *path, int flags, ...) {                                 \
    ORIGINAL(int, name);                                                                  \
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list);      \
    if (opening(dirfd, path, (flags & O_ACCMODE) != O_RDONLY, flags & O_CREAT, flags & O_TRUNC)) return -1; \
    return original(dirfd, path, flags, mode);                                            \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                       \
  FILE *name(const char *path, const char *mode) {                                        \
    ORIGINAL(FILE *, name);                                                               \
    if (opening(AT_FDCWD, path, strpbrk(mode, "wa+") != NULL, strpbrk(mode, "wa") != NULL, strchr(mode, 'w') != NULL)) return NULL; \
    return original(path, mode);                                                          \
  }
FOPEN(fopen)
FOPEN(fopen64)

int rename(const char *from, const char *to) {
  ORIGINAL(int, rename);
  return operation("rename", AT_FDCWD, from, AT_FDCWD, to, -1) ? -1 : original(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
  ORIGINAL(int, renameat);
  return operation("rename", from_fd, from, to_fd, to, -1) ? -1 : original(from_fd, from, to_fd, to);
}
int unlink(const char *path) {
  ORIGINAL(int, unlink);
  return operation("unlink", AT_FDCWD, path, 0, NULL, -1) ? -1 : original(path);
}
int unlinkat(int dirfd, const char *path, int flags) {
  ORIGINAL(int, unlinkat);
  return operation(flags & AT_REMOVEDIR ? "rmdir" : "unlink", dirfd, path, 0, NULL, -1) ? -1 : original(dirfd, path, flags);
}
int rmdir(const char *path) {
  ORIGINAL(int, rmdir);
  return operation("rmdir", AT_FDCWD, path, 0, NULL, -1) ? -1 : original(path);
}
int mkdir(const char *path, mode_t mode) {
  ORIGINAL(int, mkdir);
  struct stat status;
  if (!stat(path, &status)) return original(path, mode);
  return operation("mkdir", AT_FDCWD, path, 0, NULL, -1) ? -1 : original(path, mode);
}
int mkdirat(int dirfd, const char *path, mode_t mode) {
  ORIGINAL(int, mkdirat);
  return operation("mkdir", dirfd, path, 0, NULL, -1) ? -1 : original(dirfd, path, mode);
}

#define FSYNC(name)                                                                       \
  int name(int fd) {                                                                      \
    ORIGINAL(int, name);                                                                  \
    char link[64], path[PATH_MAX];                                                        \
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);                                  \
    ssize_t length = readlink(link, path, sizeof path - 1);                               \
    if (length > 0) {                                                                     \
      path[length] = 0;                                                                   \
      if (operation("fsync", AT_FDCWD, path, 0, NULL, fd)) return -1;                     \
    }                                                                                     \
    return original(fd);                                                                  \
  }
FSYNC(fsync)
FSYNC(fdatasync)
