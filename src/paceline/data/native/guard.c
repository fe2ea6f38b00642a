/* Shards are memory-mapped. If one is truncated, or its disk fails, reading it raises SIGBUS, which would kill the
 * process. Inside `guarded` it becomes a status. Any other SIGBUS goes to the previous handler. */
#include <setjmp.h>
#include <signal.h>

#include "codec.h"

typedef struct {
    const uint8_t *begin, *end;
    sigjmp_buf back;
} Guard;

static _Thread_local Guard *volatile active; /* a pointer, so that threads that never decode cost no memory */
static struct sigaction previous;
static volatile sig_atomic_t passing_on;
static void *volatile last_passed_on;

static void end_process(int number)
{
    signal(number, SIG_DFL);
    raise(number);
}

static void pass_on(int number, siginfo_t *info, void *context)
{
    /* A previous handler that raises the signal again, as Python's faulthandler does, or that returns without fixing
     * the cause, must not cause an endless loop. */
    if (passing_on || (info->si_code > 0 && info->si_addr == last_passed_on))
        end_process(number);
    passing_on = 1;
    last_passed_on = info->si_code > 0 ? info->si_addr : NULL;
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler == SIG_DFL || (previous.sa_handler == SIG_IGN && info->si_code > 0))
        end_process(number);
    else if (previous.sa_handler != SIG_IGN)
        previous.sa_handler(number);
    passing_on = 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    Guard *guard = active;
    const uint8_t *at = info->si_addr;
    if (guard && info->si_code > 0 && at >= guard->begin && at < guard->end)
        siglongjmp(guard->back, 1); /* safe, since the interrupted code holds no lock */
    pass_on(number, info, context);
}

/* Call this before a batch of `guarded` calls: other code may have replaced the handler since the last batch. */
void guard_install(void)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER}, found;
    sigemptyset(&action.sa_mask);
    if (!sigaction(SIGBUS, &action, &found) && found.sa_sigaction != on_bus_error)
        previous = found;
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
