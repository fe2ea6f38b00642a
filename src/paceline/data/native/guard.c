/* Shards are mapped files. Where one is truncated while it is mapped, or its disk fails, reading it raises SIGBUS, which
 * would end the process: inside `guarded` it becomes a status. Any other SIGBUS is passed on to whoever handled it before. */
#include <setjmp.h>
#include <signal.h>

#include "codec.h"

typedef struct {
    const uint8_t *begin, *end;
    sigjmp_buf back;
} Guard;

static _Thread_local Guard *volatile active; /* a pointer only: threads that never decode pay nothing for it */
static struct sigaction earlier;
static volatile sig_atomic_t passing_on;
static void *volatile last_passed_on;

static void end_process(int number)
{
    signal(number, SIG_DFL);
    raise(number);
}

static void pass_on(int number, siginfo_t *info, void *context)
{
    /* An earlier handler that raises the signal again, as Python's faulthandler does, or that returns without having
     * mended what failed, must not keep the process here for ever. */
    if (passing_on || (info->si_code > 0 && info->si_addr == last_passed_on))
        end_process(number);
    passing_on = 1;
    last_passed_on = info->si_code > 0 ? info->si_addr : NULL;
    if (earlier.sa_flags & SA_SIGINFO)
        earlier.sa_sigaction(number, info, context);
    else if (earlier.sa_handler == SIG_DFL || (earlier.sa_handler == SIG_IGN && info->si_code > 0))
        end_process(number);
    else if (earlier.sa_handler != SIG_IGN)
        earlier.sa_handler(number);
    passing_on = 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    Guard *guard = active;
    const uint8_t *at = info->si_addr;
    if (guard && info->si_code > 0 && at >= guard->begin && at < guard->end)
        siglongjmp(guard->back, 1); /* out of code that only reads the shard: it holds no lock */
    pass_on(number, info, context);
}

/* To be called before `guarded`, once for many calls: others may have set a handler in the meantime. */
void guard_install(void)
{
    struct sigaction own = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER}, found;
    sigemptyset(&own.sa_mask);
    if (!sigaction(SIGBUS, &own, &found) && found.sa_sigaction != on_bus_error)
        earlier = found;
}

Status guarded(const uint8_t *bytes, size_t length, Status (*work)(void *), void *argument)
{
    Guard guard = {.begin = bytes, .end = bytes + length};
    if (sigsetjmp(guard.back, 0)) {
        active = NULL;
        return RECORD_LOST;
    }
    active = &guard;
    Status status = work(argument);
    active = NULL;
    return status;
}
