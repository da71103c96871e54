//! `shim.h` in Rust, name by name and in its order; a test holds the two against each other. Loading it is all that happens
//! here: what calls mean stands in `shim.h`, and who may make them in `shim.rs`.

use libloading::Library;
use std::ffi::{c_char, c_void};

/// `XDNA_SHIM_ABI`.
pub const XDNA_SHIM_ABI: u32 = 1;
/// `XDNA_OK`.
pub const XDNA_OK: i32 = 0;
/// `XDNA_SYSTEM`.
pub const XDNA_SYSTEM: i32 = 1;
/// `XDNA_EXCEPTION`.
#[allow(dead_code, reason = "the header's whole list, so that the test can compare it")]
pub const XDNA_EXCEPTION: i32 = 2;
/// `XDNA_UNKNOWN`.
#[allow(dead_code, reason = "the header's whole list, so that the test can compare it")]
pub const XDNA_UNKNOWN: i32 = 3;
/// `XDNA_COMMAND`.
pub const XDNA_COMMAND: i32 = 4;

macro_rules! opaque {
    ($($name:ident)*) => {$(
        /// A handle of the shim; only ever behind a pointer.
        #[allow(non_camel_case_types)]
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}

opaque! { xdna_device xdna_context xdna_kernel xdna_buffer xdna_run }

/// How a call went.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct xdna_error {
    /// One of the constants above.
    pub kind: i32,
    /// What the kind says it is.
    pub code: i32,
    /// Words, ended by a NUL.
    pub text: [c_char; 504],
}

macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $back:ty)?;)*) => {
        /// The functions of the loaded library.
        pub struct Functions {
            $(#[allow(dead_code, reason = "the header's whole list")] pub $name: unsafe extern "C" fn($($arg: $type),*) $(-> $back)?,)*
            // Never dropped on its own: XRT starts threads, and its code must stay mapped while they run.
            _library: std::mem::ManuallyDrop<Library>,
        }

        impl Functions {
            /// Takes the functions from a library, or says which one it lacks.
            ///
            /// # Safety
            /// The functions of these names must have these types, which `xdna_abi` vouches for.
            pub unsafe fn of(library: Library) -> Result<Functions, libloading::Error> {
                Ok(Functions {
                    // SAFETY: the caller's promise.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },)*
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

functions! {
    fn xdna_abi() -> u32;
    fn xdna_versions(runtime: *mut u32, built: *mut u32, e: *mut xdna_error) -> i32;
    fn xdna_device_count(count: *mut u32, e: *mut xdna_error) -> i32;
    fn xdna_leave(code: i32);
    fn xdna_device_open(index: u32, e: *mut xdna_error) -> *mut xdna_device;
    fn xdna_device_text(d: *mut xdna_device, what: i32, out: *mut c_char, n: usize, e: *mut xdna_error) -> i32;
    fn xdna_device_free(d: *mut xdna_device);
    fn xdna_context_xclbin(d: *mut xdna_device, bytes: *const c_void, n: usize, e: *mut xdna_error) -> *mut xdna_context;
    fn xdna_context_elf(d: *mut xdna_device, bytes: *const c_void, n: usize, e: *mut xdna_error) -> *mut xdna_context;
    fn xdna_context_add(c: *mut xdna_context, bytes: *const c_void, n: usize, e: *mut xdna_error) -> i32;
    fn xdna_context_free(c: *mut xdna_context);
    fn xdna_kernel_open(c: *mut xdna_context, name: *const c_char, e: *mut xdna_error) -> *mut xdna_kernel;
    fn xdna_kernel_group(k: *mut xdna_kernel, arg: i32, group: *mut i32, e: *mut xdna_error) -> i32;
    fn xdna_kernel_free(k: *mut xdna_kernel);
    fn xdna_buffer_data(d: *mut xdna_device, n: usize, e: *mut xdna_error) -> *mut xdna_buffer;
    fn xdna_buffer_grouped(d: *mut xdna_device, group: i32, n: usize, e: *mut xdna_error) -> *mut xdna_buffer;
    fn xdna_buffer_instructions(d: *mut xdna_device, group: i32, n: usize, e: *mut xdna_error) -> *mut xdna_buffer;
    fn xdna_buffer_import(d: *mut xdna_device, fd: i32, e: *mut xdna_error) -> *mut xdna_buffer;
    fn xdna_buffer_export(b: *mut xdna_buffer, fd: *mut i32, e: *mut xdna_error) -> i32;
    fn xdna_buffer_map(b: *mut xdna_buffer, e: *mut xdna_error) -> *mut c_void;
    fn xdna_buffer_address(b: *mut xdna_buffer, address: *mut u64, size: *mut u64, e: *mut xdna_error) -> i32;
    fn xdna_buffer_sync(b: *mut xdna_buffer, to_device: i32, n: usize, offset: usize, e: *mut xdna_error) -> i32;
    fn xdna_buffer_free(b: *mut xdna_buffer);
    fn xdna_run_new(k: *mut xdna_kernel, e: *mut xdna_error) -> *mut xdna_run;
    fn xdna_run_set_u64(r: *mut xdna_run, arg: i32, value: u64, e: *mut xdna_error) -> i32;
    fn xdna_run_set_u32(r: *mut xdna_run, arg: i32, value: u32, e: *mut xdna_error) -> i32;
    fn xdna_run_set_buffer(r: *mut xdna_run, arg: i32, b: *mut xdna_buffer, e: *mut xdna_error) -> i32;
    fn xdna_run_start(r: *mut xdna_run, e: *mut xdna_error) -> i32;
    fn xdna_run_wait(r: *mut xdna_run, ms: u32, state: *mut i32, e: *mut xdna_error) -> i32;
    fn xdna_run_free(r: *mut xdna_run);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    /// A C type as Rust writes it.
    fn rust_type(c: &str) -> String {
        let (constant, c) = c.trim().strip_prefix("const ").map_or((false, c.trim()), |rest| (true, rest));
        let pointer = c.ends_with('*');
        let name = match c.trim_end_matches('*').trim() {
            "uint32_t" => "u32",
            "int32_t" => "i32",
            "uint64_t" => "u64",
            "size_t" => "usize",
            "char" => "c_char",
            "void" if pointer => "c_void",
            "void" => "()",
            other => other,
        };
        match (pointer, constant) {
            (true, true) => format!("*const {name}"),
            (true, false) => format!("*mut {name}"),
            (false, _) => name.to_owned(),
        }
    }

    /// `TYPE NAME` or `TYPE *NAME`, split.
    fn declared(text: &str) -> (String, String) {
        let text = text.trim();
        let at = text.rfind([' ', '*']).unwrap() + 1;
        (rust_type(&text[..at]), text[at..].to_owned())
    }

    /// Functions of the header: name to `(args) -> back`.
    fn header() -> Vec<(String, String)> {
        let text = include_str!("../shim.h");
        let (mut code, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once("/*") {
            code.push_str(before);
            rest = after.split_once("*/").unwrap().1;
        }
        code.push_str(rest);
        let lines: String = code.lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>().join(" ");
        lines
            .split(';')
            .filter_map(|statement| {
                let (head, args) = statement.trim().split_once('(')?;
                let (back, name) = declared(head.trim_start_matches("extern \"C\" {").trim());
                let args = args.trim_end().strip_suffix(')').unwrap();
                let args: Vec<String> = args
                    .split(',')
                    .filter(|a| a.trim() != "void")
                    .map(|a| {
                        let (of, name) = declared(a);
                        format!("{name}: {of}")
                    })
                    .collect();
                Some((name, format!("({}) -> {back}", args.join(", "))))
            })
            .collect()
    }

    fn bindings() -> Vec<(String, String)> {
        let text = include_str!("ffi.rs");
        let block = text.split_once("\nfunctions! {\n").unwrap().1.split_once("\n}\n").unwrap().0;
        block
            .lines()
            .map(|line| {
                let line = line.trim().strip_prefix("fn ").unwrap().strip_suffix(';').unwrap();
                let (name, rest) = line.split_once('(').unwrap();
                let (args, back) = rest.split_once(')').unwrap();
                (name.to_owned(), format!("({args}) -> {}", back.trim().strip_prefix("-> ").unwrap_or("()")))
            })
            .collect()
    }

    #[test]
    fn the_bindings_are_the_header() {
        assert_eq!(header(), bindings());
        assert!(bindings().len() > 25);
    }

    #[test]
    fn the_constants_are_the_header() {
        let header: BTreeMap<&str, i64> = include_str!("../shim.h")
            .lines()
            .filter_map(|l| l.strip_prefix("#define XDNA_")?.split_once(' '))
            .filter_map(|(name, value)| Some((name, value.trim().parse().ok()?)))
            .collect();
        let ours = BTreeMap::from([
            ("SHIM_ABI", i64::from(super::XDNA_SHIM_ABI)),
            ("OK", super::XDNA_OK.into()),
            ("SYSTEM", super::XDNA_SYSTEM.into()),
            ("EXCEPTION", super::XDNA_EXCEPTION.into()),
            ("UNKNOWN", super::XDNA_UNKNOWN.into()),
            ("COMMAND", super::XDNA_COMMAND.into()),
        ]);
        assert_eq!(header, ours);
        // int32_t, int32_t, char[504].
        assert_eq!(std::mem::size_of::<super::xdna_error>(), 512);
        assert!(include_str!("../shim.h").contains("char text[504];"));
    }
}
