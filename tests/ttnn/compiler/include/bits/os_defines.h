// What libstdc++ asks of the operating system: there is none.
