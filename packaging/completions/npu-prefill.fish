# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_npu_prefill_global_optspecs
    string join \n tokens= out= m/model= layout= fds= state-version= c/ctx-size= cache-type-k= cache-type-v= flash-attn= attn-rot= checkpoint= swa-full n-stream= config= chunk= isa= t/threads= elfs= device= min-tokens= max-memory= deadline= h/help V/version
end

function __fish_npu_prefill_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_npu_prefill_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_npu_prefill_using_subcommand
    set -l cmd (__fish_npu_prefill_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l tokens -d 'Token ids of the prompt, the last one left out: decimal text, JSON, or raw 32-bit integers' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l out -d 'State file to write, in the decoder\'s --slot-save-path' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -s m -l model -d 'The decoder\'s model; any shard of a split one' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l layout -d 'Shared route, instead of --out: the file in which the decoder describes its memory' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l fds -d 'Shared route: the inherited descriptors of that memory, one per region, in their order' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l state-version -d 'Version of the state file: 2, 3, 4 or auto. auto is that of the newest state file beside --out, else the configured one, else 3 [env: NPU_PREFILL_STATE_VERSION] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -s c -l ctx-size -d 'Context size; 0 is the model\'s own [env: LLAMA_ARG_CTX_SIZE]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l cache-type-k -d 'Type of the keys, also -ctk: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_K] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l cache-type-v -d 'Type of the values, also -ctv: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_V] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l flash-attn -d 'Flash attention, also -fa: on, off or auto [env: LLAMA_ARG_FLASH_ATTN] [default: auto, which is on]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l attn-rot -d 'Whether the decoder rotates the rows of quantised caches: on, off or auto. auto is what a probe found, else on for version 4, which says so in the file, and else refused [env: NPU_PREFILL_ATTN_ROT, and LLAMA_ATTN_ROT_DISABLE for off] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l checkpoint -d 'Whether the decoder reads checkpoints behind a state, with which prompts within a sliding window gain too: on, off or auto. auto is on for version 4; a decoder that does not read them ignores them [env: NPU_PREFILL_CHECKPOINT] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l n-stream -d 'Streams of its cache: 1, or the number of slots where their memory is not unified [env: NPU_PREFILL_N_STREAM] [default: 1]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l config -d 'Configuration file, as a probe of the decoder writes it [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l chunk -d 'Tokens computed at a time; bounds memory [env: NPU_PREFILL_CHUNK] [default: 512]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l isa -d 'Instruction set of the host kernels: auto, scalar, avx2, avx512, avx512bf16 or neon [env: NPU_PREFILL_ISA] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -s t -l threads -d 'Threads [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l elfs -d 'Directory of NPU kernels [env: ONEBIT_HYBRID_ELFS]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l device -d 'Where to compute matrix products: auto takes the NPU where there are a device and kernels that pass their self-test; oracle computes what the kernels of --elfs would, on this processor; sim is an NPU\'s double, for tests [env: NPU_PREFILL_DEVICE] [default: auto]' -r -f -a "auto\t'The best there is'
cpu\t'The host'
npu\t'An NPU or nothing'
oracle\t'The kernels\' arithmetic, on the host'
sim\t'The double of an NPU'"
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l min-tokens -d 'Decline with exit code 77 when there are fewer ids [env: NPU_PREFILL_MIN_TOKENS]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l max-memory -d 'Refuse before loading when the estimate is higher: bytes, or with K, M, G [env: NPU_PREFILL_MAX_MEMORY]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l deadline -d 'Give up after so many seconds, fractions allowed [env: NPU_PREFILL_DEADLINE]' -r
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -l swa-full -d 'The decoder keeps all positions of sliding-window layers [env: LLAMA_ARG_SWA_FULL]'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -s V -l version -d 'Print version'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "inspect" -d 'Describe a GGUF model or a state file, and what is wrong with it'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "compare" -d 'Print how far two state files are apart, per layer; A is the reference'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "plan" -d 'Print what a prefill would do, command by command, and how much memory it would need'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "layout" -d 'Print how the memory of a decoder that shares it is laid out: regions, sizes, hashes, tensors'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "doctor" -d 'Say what of an NPU there is on this machine, what is missing, and what to do; exit code 69 where it cannot be used'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "selftest" -d 'Test every kernel of --elfs and a tiny prefill with them, and print a report to send'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "models" -d 'List the model architectures that are supported, what each was proved on, and the cache types'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "setup" -d 'Set up for a running llama-server: look at its state files, write the configuration, try one handoff, say what it gains'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "environment" -d 'List the environment variables, as a Markdown table'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "completions" -d 'Print completions for a shell'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "man" -d 'Print the manual page'
complete -c npu-prefill -n "__fish_npu_prefill_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand inspect" -l json -d 'Print JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand inspect" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand compare" -l json -d 'Print JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand compare" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -s m -l model -d 'The model' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -s n -l n-tokens -d 'Number of tokens' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l state-version -d 'Version of the state file: 2, 3, 4 or auto. auto is that of the newest state file beside --out, else the configured one, else 3 [env: NPU_PREFILL_STATE_VERSION] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -s c -l ctx-size -d 'Context size; 0 is the model\'s own [env: LLAMA_ARG_CTX_SIZE]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l cache-type-k -d 'Type of the keys, also -ctk: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_K] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l cache-type-v -d 'Type of the values, also -ctv: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_V] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l flash-attn -d 'Flash attention, also -fa: on, off or auto [env: LLAMA_ARG_FLASH_ATTN] [default: auto, which is on]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l attn-rot -d 'Whether the decoder rotates the rows of quantised caches: on, off or auto. auto is what a probe found, else on for version 4, which says so in the file, and else refused [env: NPU_PREFILL_ATTN_ROT, and LLAMA_ATTN_ROT_DISABLE for off] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l checkpoint -d 'Whether the decoder reads checkpoints behind a state, with which prompts within a sliding window gain too: on, off or auto. auto is on for version 4; a decoder that does not read them ignores them [env: NPU_PREFILL_CHECKPOINT] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l n-stream -d 'Streams of its cache: 1, or the number of slots where their memory is not unified [env: NPU_PREFILL_N_STREAM] [default: 1]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l config -d 'Configuration file, as a probe of the decoder writes it [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l chunk -d 'Tokens computed at a time; bounds memory [env: NPU_PREFILL_CHUNK] [default: 512]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l isa -d 'Instruction set of the host kernels: auto, scalar, avx2, avx512, avx512bf16 or neon [env: NPU_PREFILL_ISA] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -s t -l threads -d 'Threads [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l elfs -d 'Directory of NPU kernels [env: ONEBIT_HYBRID_ELFS]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l device -d 'Where to compute matrix products: auto takes the NPU where there are a device and kernels that pass their self-test; oracle computes what the kernels of --elfs would, on this processor; sim is an NPU\'s double, for tests [env: NPU_PREFILL_DEVICE] [default: auto]' -r -f -a "auto\t'The best there is'
cpu\t'The host'
npu\t'An NPU or nothing'
oracle\t'The kernels\' arithmetic, on the host'
sim\t'The double of an NPU'"
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l explain -d 'Also print on which device each command would be carried out, and why'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -l swa-full -d 'The decoder keeps all positions of sliding-window layers [env: LLAMA_ARG_SWA_FULL]'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand plan" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -s m -l model -d 'The model' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l ubatch-size -d 'Micro-batch of the decoder, also -ub; only sliding-window layers depend on it' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l state-version -d 'Version of the state file: 2, 3, 4 or auto. auto is that of the newest state file beside --out, else the configured one, else 3 [env: NPU_PREFILL_STATE_VERSION] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -s c -l ctx-size -d 'Context size; 0 is the model\'s own [env: LLAMA_ARG_CTX_SIZE]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l cache-type-k -d 'Type of the keys, also -ctk: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_K] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l cache-type-v -d 'Type of the values, also -ctv: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_V] [default: f16]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l flash-attn -d 'Flash attention, also -fa: on, off or auto [env: LLAMA_ARG_FLASH_ATTN] [default: auto, which is on]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l attn-rot -d 'Whether the decoder rotates the rows of quantised caches: on, off or auto. auto is what a probe found, else on for version 4, which says so in the file, and else refused [env: NPU_PREFILL_ATTN_ROT, and LLAMA_ATTN_ROT_DISABLE for off] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l checkpoint -d 'Whether the decoder reads checkpoints behind a state, with which prompts within a sliding window gain too: on, off or auto. auto is on for version 4; a decoder that does not read them ignores them [env: NPU_PREFILL_CHECKPOINT] [default: auto]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l n-stream -d 'Streams of its cache: 1, or the number of slots where their memory is not unified [env: NPU_PREFILL_N_STREAM] [default: 1]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l config -d 'Configuration file, as a probe of the decoder writes it [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l json -d 'Print the header that such a decoder would send, as JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -l swa-full -d 'The decoder keeps all positions of sliding-window layers [env: LLAMA_ARG_SWA_FULL]'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand layout" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand doctor" -s t -l threads -d 'Threads [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand doctor" -l elfs -d 'Directory of NPU kernels [env: ONEBIT_HYBRID_ELFS]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand doctor" -l device -d 'Where to compute matrix products: auto takes the NPU where there are a device and kernels that pass their self-test; oracle computes what the kernels of --elfs would, on this processor; sim is an NPU\'s double, for tests [env: NPU_PREFILL_DEVICE] [default: auto]' -r -f -a "auto\t'The best there is'
cpu\t'The host'
npu\t'An NPU or nothing'
oracle\t'The kernels\' arithmetic, on the host'
sim\t'The double of an NPU'"
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand doctor" -l json -d 'Print JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -s t -l threads -d 'Threads [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -l elfs -d 'Directory of NPU kernels [env: ONEBIT_HYBRID_ELFS]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -l device -d 'Where to compute matrix products: auto takes the NPU where there are a device and kernels that pass their self-test; oracle computes what the kernels of --elfs would, on this processor; sim is an NPU\'s double, for tests [env: NPU_PREFILL_DEVICE] [default: auto]' -r -f -a "auto\t'The best there is'
cpu\t'The host'
npu\t'An NPU or nothing'
oracle\t'The kernels\' arithmetic, on the host'
sim\t'The double of an NPU'"
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -l fds -d 'Inherited descriptors: say whether a kernel can write into their memory; overwrites their first bytes' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -l import -d 'How it gets there: own mapping, the driver\'s, or a buffer of the device\'s and a copy; auto tries the first, then the last' -r -f -a "auto\t'The first, and where that is wrong the last'
own\t'The address of our own mapping'
driver\t'A buffer that the driver maps'
bounce\t'A buffer of the device\'s, copied out by the processor'"
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -l json -d 'Print JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand selftest" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand models" -l json -d 'Print JSON'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand models" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -l server -d 'The server, such as http://127.0.0.1:8080. What its slot 0 holds is lost' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -l slots -d 'The directory of its --slot-save-path' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -s m -l model -d 'The model it runs' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -l config -d 'Configuration file to write [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]' -r -F
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -s n -l prompt-tokens -d 'Tokens of the built-in prompt; more where the model has a sliding window, fewer where the context is smaller' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -s t -l threads -d 'Threads of the handoff [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]' -r
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand setup" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand environment" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand completions" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand man" -s h -l help -d 'Print help'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "inspect" -d 'Describe a GGUF model or a state file, and what is wrong with it'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "compare" -d 'Print how far two state files are apart, per layer; A is the reference'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "plan" -d 'Print what a prefill would do, command by command, and how much memory it would need'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "layout" -d 'Print how the memory of a decoder that shares it is laid out: regions, sizes, hashes, tensors'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "doctor" -d 'Say what of an NPU there is on this machine, what is missing, and what to do; exit code 69 where it cannot be used'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "selftest" -d 'Test every kernel of --elfs and a tiny prefill with them, and print a report to send'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "models" -d 'List the model architectures that are supported, what each was proved on, and the cache types'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "setup" -d 'Set up for a running llama-server: look at its state files, write the configuration, try one handoff, say what it gains'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "environment" -d 'List the environment variables, as a Markdown table'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "completions" -d 'Print completions for a shell'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "man" -d 'Print the manual page'
complete -c npu-prefill -n "__fish_npu_prefill_using_subcommand help; and not __fish_seen_subcommand_from inspect compare plan layout doctor selftest models setup environment completions man help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
