"""How Flower's programs hear that there is something to do, in place of their questions every few seconds.

    who waits        for what              who wakes it                                   where
    SuperExec        a task                its SuperLink or SuperNode                     wakeup
    SuperNode        a message             the ServerApp; a SuperNode that has found one  wakeup, pace
    SuperNode        its ClientApp's reply itself, when the last part is stored           wakeup
    ServerApp        replies               the SuperNode that has sent one                reply_waits
    HTTP servers     their end             a signal                                       ticks

A wake-up says "ask now", nothing else. Who is not woken asks at intervals, as in Flower: one that is lost
costs a wait.
"""
