/* A disk of known behavior, preloaded into a process (tests/disk.py).

   What the process does to files below DISK_ROOT is written down in DISK_LOG, in order and with its content. After
   DISK_ROOM bytes the disk fails DISK_FAILURES times with DISK_ERRNO: ENOSPC and the like refuse to write, EROFS refuses
   every change, EIO takes what is written and loses it before fsync. Nothing waits for the real disk. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, WRITE, TRUNCATE, RENAME, REMOVE, MKDIR, SYNC, UNSEEN };

struct entry {
    uint32_t kind, path, other, data; /* the lengths of what follows */
    uint64_t inode, offset;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root;
static int log_file = -1, error;
static long long room = -1, failures = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("DISK_LOG");
    root = getenv("DISK_ROOT");
    if (log) log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (getenv("DISK_ROOM")) room = atoll(getenv("DISK_ROOM"));
    if (getenv("DISK_FAILURES")) failures = atoll(getenv("DISK_FAILURES"));
    if (getenv("DISK_ERRNO")) error = atoi(getenv("DISK_ERRNO"));
}

/* ---- which file is meant ---- */

static int is_below_root(const char *path) {
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return is_below_root(path);
}

static int resolve(int folder, const char *name, char *path) {
    if (!name) return 0;
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        if (folder != AT_FDCWD) path_of(folder, path);
        else if (!getcwd(path, PATH_MAX)) return 0;
        size_t used = strlen(path);
        snprintf(path + used, PATH_MAX - used, "/%s", name);
    }
    return is_below_root(path);
}

static uint64_t inode_of(int file) {
    struct stat found;
    return fstat(file, &found) ? 0 : found.st_ino;
}

/* ---- what is written down, and what fails ---- */

static void note(int kind, uint64_t inode, uint64_t offset, const char *path, const char *other, const void *data,
                 size_t length) {
    if (log_file < 0) return;
    struct entry entry = {kind, strlen(path), strlen(other), length, inode, offset};
    struct iovec parts[] = {
        {&entry, sizeof entry}, {(void *)path, entry.path}, {(void *)other, entry.other}, {(void *)data, length}};
    if (syscall(SYS_writev, log_file, parts, 4) != (ssize_t)(sizeof entry + entry.path + entry.other + length)) abort();
}

static int fails(void) {
    if (room) return 0;
    if (!failures) {
        room = -1; /* the disk works again */
        return 0;
    }
    if (failures > 0) failures--;
    errno = error;
    return 1;
}

static int refuses_changes(void) { return error == EROFS && fails(); }

/* How many bytes fit; -1 if none. */
static ssize_t fitting(size_t count) {
    if (room < 0 || !count) return count;
    if (error == EIO) {
        room = room > (long long)count ? room - (long long)count : 0;
        return count;
    }
    if (fails()) return -1;
    if (room < 0) return count;
    size_t some = (long long)count < room ? count : (size_t)room;
    room -= some;
    return some;
}

/* ---- content ---- */

static ssize_t write_at(int file, const void *data, size_t count, off_t offset) {
    char path[PATH_MAX];
    struct stat found;
    int seen = path_of(file, path) && !fstat(file, &found) && S_ISREG(found.st_mode);
    if (!seen) return offset < 0 ? REAL(write)(file, data, count) : REAL(pwrite)(file, data, count, offset);
    pthread_mutex_lock(&lock);
    ssize_t done = fitting(count);
    if (done > 0) {
        int appends = fcntl(file, F_GETFL) & O_APPEND;
        fstat(file, &found);
        off_t place = offset >= 0 ? offset : appends ? found.st_size : lseek(file, 0, SEEK_CUR);
        done = offset < 0 ? REAL(write)(file, data, done) : REAL(pwrite)(file, data, done, offset);
        if (done > 0) note(WRITE, found.st_ino, place, path, "", data, done);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int file, const void *data, size_t count) { return write_at(file, data, count, -1); }
ssize_t pwrite(int file, const void *data, size_t count, off_t offset) { return write_at(file, data, count, offset); }
ssize_t pwrite64(int file, const void *data, size_t count, off_t offset) { return write_at(file, data, count, offset); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return REAL(writev)(file, parts, count);
    for (int part = 0; part < count; part++) /* a short write is allowed: the caller writes the rest */
        if (parts[part].iov_len) return write(file, parts[part].iov_base, parts[part].iov_len);
    return 0;
}

int ftruncate(int file, off_t size) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return REAL(ftruncate)(file, size);
    pthread_mutex_lock(&lock);
    int done = refuses_changes() ? -1 : REAL(ftruncate)(file, size);
    if (!done) note(TRUNCATE, inode_of(file), size, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

int fsync(int file) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return REAL(fsync)(file);
    pthread_mutex_lock(&lock);
    int done = (error == EIO || error == EROFS) && fails() ? -1 : 0;
    if (!done) note(SYNC, inode_of(file), 0, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int fdatasync(int file) { return fsync(file); }

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    char path[PATH_MAX];
    if (file >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) && path_of(file, path))
        note(UNSEEN, inode_of(file), 0, path, "", "", 0);
    return (void *)syscall(SYS_mmap, address, length, protection, flags, file, offset);
}
void *mmap64(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    return mmap(address, length, protection, flags, file, offset);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    char path[PATH_MAX];
    (void)in, (void)offset, (void)count;
    if (!path_of(out, path)) return syscall(SYS_sendfile, out, in, offset, count);
    errno = EINVAL; /* the caller writes instead */
    return -1;
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t count) { return sendfile(out, in, offset, count); }

/* ---- names ---- */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!resolve(folder, name, path)) return (int)syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
    int existed = !access(path, F_OK);
    int file = changes && refuses_changes() ? -1 : (int)syscall(SYS_openat, folder, name, flags, mode);
    if (file >= 0) {
        note(existed ? OPEN : CREATE, inode_of(file), 0, path, "", "", 0);
        if (existed && (flags & O_TRUNC)) note(TRUNCATE, inode_of(file), 0, path, "", "", 0);
    }
    pthread_mutex_unlock(&lock);
    return file;
}

#define OPEN_AS(function)                                                                                              \
    int function(const char *name, int flags, ...) {                                                                   \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, int);                                                                               \
        va_end(more);                                                                                                  \
        return opened(AT_FDCWD, name, flags, mode);                                                                    \
    }
#define OPENAT_AS(function)                                                                                            \
    int function(int folder, const char *name, int flags, ...) {                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, int);                                                                               \
        va_end(more);                                                                                                  \
        return opened(folder, name, flags, mode);                                                                      \
    }
OPEN_AS(open)
OPEN_AS(open64)
OPENAT_AS(openat)
OPENAT_AS(openat64)

int renameat(int folder, const char *old, int other_folder, const char *new) {
    char path[PATH_MAX], other[PATH_MAX];
    int seen = resolve(folder, old, path) | resolve(other_folder, new, other);
    pthread_mutex_lock(&lock);
    int done = seen && refuses_changes() ? -1 : (int)syscall(SYS_renameat2, folder, old, other_folder, new, 0);
    if (!done && seen) note(RENAME, 0, 0, path, other, "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    int seen = resolve(folder, name, path);
    pthread_mutex_lock(&lock);
    int done = seen && refuses_changes() ? -1 : (int)syscall(SYS_unlinkat, folder, name, flags);
    if (!done && seen) note(REMOVE, 0, 0, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int seen = resolve(folder, name, path);
    pthread_mutex_lock(&lock);
    int done = seen && refuses_changes() ? -1 : (int)syscall(SYS_mkdirat, folder, name, mode);
    if (!done && seen) note(MKDIR, 0, 0, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
