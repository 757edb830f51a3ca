//! Names of addresses of this very process: its memory map says which file, the file's debug information and symbols say which call.
//!
//! Reads `/proc/self/maps` and the mapped files; nothing of the engine's data.

use std::fs;

use addr2line::Loader;

/// A program or library, and how far from its own addresses it was loaded.
struct Module {
    ranges: Vec<(usize, usize)>,
    base: usize,
    name: String,
    loader: Option<Loader>,
}

/// Everything executable that is mapped now.
pub struct Symbols {
    modules: Vec<Module>,
}

impl Symbols {
    /// The mapped files by name alone: cheap.
    pub fn of_this_process() -> Self {
        Self { modules: modules(&fs::read_to_string("/proc/self/maps").unwrap_or_default()) }
    }

    /// Opens the files' debug information: may take tenths of a second.
    pub fn load(&mut self) {
        let own = fs::read_link("/proc/self/exe").map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
        for module in &mut self.modules {
            // the program's own file may have been replaced since it was started
            let path = if module.name == own { "/proc/self/exe" } else { &module.name };
            module.loader = Loader::new(path).ok();
        }
    }

    /// The calls at this address, innermost first: more than one where the compiler has folded one into another.
    pub fn name(&self, address: usize) -> Vec<String> {
        let Some(module) = self.modules.iter().find(|module| module.holds(address)) else {
            return vec![format!("{address:#x} in no file")];
        };
        let within = (address - module.base) as u64;
        let unknown = || format!("{}+{within:#x}", last_parts(&module.name, 1));
        let Some(loader) = &module.loader else { return vec![unknown()] };
        let mut names = Vec::new();
        if let Ok(mut frames) = loader.find_frames(within) {
            while let Ok(Some(frame)) = frames.next() {
                let function = frame.function.as_ref().and_then(|name| Some(name.demangle().ok()?.into_owned()));
                let place = frame.location.and_then(|at| Some((source_name(at.file?), at.line.unwrap_or(0))));
                let function = function.or_else(|| symbol(loader, within)).unwrap_or_else(unknown);
                names.push(match place {
                    Some((file, line)) => format!("{function} ({file}:{line})"),
                    None => function,
                });
            }
        }
        if names.is_empty() {
            let function = symbol(loader, within).map(|name| format!("{name} ({})", last_parts(&module.name, 1)));
            names.push(function.unwrap_or_else(unknown));
        }
        names
    }
}

impl Module {
    fn holds(&self, address: usize) -> bool {
        self.ranges.iter().any(|(from, to)| (*from..*to).contains(&address))
    }
}

fn symbol(loader: &Loader, address: u64) -> Option<String> {
    loader.find_symbol(address).map(|name| addr2line::demangle_auto(name.into(), None).into_owned())
}

/// A source file without where it was built: `rust/core/…` of the standard library, `tokio-1.2.3/src/…` of a dependency, else its end.
fn source_name(path: &str) -> String {
    if let Some((_, rest)) = path.split_once("/library/").filter(|_| path.starts_with("/rustc/")) {
        return format!("rust/{rest}");
    }
    match path.split_once("/registry/src/").and_then(|(_, rest)| rest.split_once('/')) {
        Some((_, rest)) => rest.to_owned(),
        None => last_parts(path, 3),
    }
}

/// The end of a path: what is in a name, without where it was built.
fn last_parts(path: &str, count: usize) -> String {
    let parts: Vec<&str> = path.rsplit('/').take(count).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The files of a memory map. A file's base is where its beginning lies.
fn modules(maps: &str) -> Vec<Module> {
    let mut modules: Vec<Module> = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(rights), Some(offset)) = (words.next(), words.next(), words.next()) else { continue };
        let Some(path) = line.find('/').map(|at| &line[at..]) else { continue };
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let Some((from, to)) = range.split_once('-').and_then(|(a, b)| Some((number(a)?, number(b)?))) else {
            continue;
        };
        let base = from.saturating_sub(number(offset).unwrap_or(0));
        let at = modules.iter().position(|module| module.name == path).unwrap_or_else(|| {
            modules.push(Module { ranges: Vec::new(), base, name: path.to_owned(), loader: None });
            modules.len() - 1
        });
        if rights.contains('x') {
            modules[at].ranges.push((from, to));
        }
    }
    modules.retain(|module| !module.ranges.is_empty());
    modules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_by_files() {
        let maps = "5500-5600 r--p 00000000 08:01 7 /bin/prog x\n5600-5700 r-xp 00000100 08:01 7 /bin/prog x\n\
                    7000-7100 rw-p 00000000 00:00 0\nffff-10000 r-xp 00000000 00:00 0 [vdso]\n6000-6100 r--p 0 08:01 8 /lib/data\n";
        let modules = modules(maps);
        assert_eq!(modules.len(), 1);
        assert_eq!(
            (modules[0].name.as_str(), modules[0].base, &modules[0].ranges),
            ("/bin/prog x", 0x5500, &vec![(0x5600, 0x5700)])
        );
    }

    #[test]
    fn a_source_file_is_told_without_where_it_was_built() {
        assert_eq!(source_name("/rustc/59807616/library/core/src/hint.rs"), "rust/core/src/hint.rs");
        assert_eq!(source_name("/b/registry/src/index-1/tokio-1.2.3/src/park.rs"), "tokio-1.2.3/src/park.rs");
        assert_eq!(source_name("/some/where/engine/src/fault.rs"), "engine/src/fault.rs");
    }

    #[test]
    fn own_functions_have_names_and_a_wild_address_has_none() {
        let mut symbols = Symbols::of_this_process();
        symbols.load();
        let address = own_functions_have_names_and_a_wild_address_has_none as fn() as usize;
        let names = symbols.name(address + 1).join(" < ");
        assert!(names.contains("own_functions_have_names"), "{names}");
        assert_eq!(symbols.name(0x10), ["0x10 in no file"]);
    }
}
