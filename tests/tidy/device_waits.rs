//! No wait for a device without a deadline (E1): the driver's calls that block until the device is done, and those that do so on the way
//! (copies without a stream, freeing), are named nowhere in the code. Comments may say their names.

use syn::visit::{self, Visit};

use crate::paths;
use crate::tree::{Finding, Tree};

/// Beginnings of names; `cuMemcpyHtoDAsync` is allowed, `cuMemcpyHtoD_v2` is not.
const CALLS: [&str; 14] = [
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuStreamWaitValue",
    "cuMemcpyHtoD_",
    "cuMemcpyDtoH_",
    "cuMemcpyDtoD_",
    "cuMemFree",
    "cuCtxDestroy",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
];
/// Modules of cudarc that call them for whoever uses them.
const MODULES: [&[&str]; 3] =
    [&["cudarc", "driver", "safe"], &["cudarc", "driver", "result"], &["cudarc", "driver", "Cuda"]];

/// Every place that names one.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        let mut found = |line, what: &str| {
            let what = format!("names {what}, which waits for a device without a deadline (E1)");
            findings.push(Finding { path: file.path.clone(), line, what });
        };
        if let Some(source) = &file.rust {
            for path in paths::named(source) {
                let blocked = path.segments.iter().find(|segment| CALLS.iter().any(|call| segment.starts_with(call)));
                if let Some(name) = blocked.cloned().or_else(|| module(&path.segments)) {
                    found(path.line, &name);
                }
            }
            let mut methods = Methods::default();
            methods.visit_file(source);
            methods.lines.iter().for_each(|line| found(*line, "`.synchronize()`"));
        } else if [".cu", ".cuh", ".c", ".cpp", ".h"].iter().any(|end| file.path.ends_with(end)) {
            for (index, line) in file.text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                if let Some(call) = CALLS.iter().find(|call| code.contains(**call)) {
                    found(index + 1, call);
                }
            }
        }
    }
    findings
}

/// The module's name, if the path goes through one of cudarc's that wait.
fn module(segments: &[String]) -> Option<String> {
    let goes = |module: &&&[&str]| {
        let (last, before) = module.split_last()?;
        let same = segments.len() > before.len() && before.iter().zip(segments).all(|(a, b)| a == b);
        (same && segments[before.len()].starts_with(last)).then_some(())
    };
    MODULES.iter().find(|module| goes(module).is_some()).map(|_| segments.join("::"))
}

#[derive(Default)]
struct Methods {
    lines: Vec<usize>,
}

impl<'ast> Visit<'ast> for Methods {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "synchronize" {
            self.lines.push(call.method.span().start().line);
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[test]
fn calls_that_wait_are_found_and_comments_and_asynchronous_ones_are_not() {
    let found = |path: &str, text: &str| check(&Tree::one(path, text)).len();
    let rust = "engine/src/backend/cuda/nvidia.rs";
    for bad in ["cuEventSynchronize(e)", "sys::cuStreamSynchronize(s)", "sys::cuMemFree_v2(p)", "stream.synchronize()"]
    {
        assert_eq!(found(rust, &format!("fn f() {{ {bad}; }}")), 1, "{bad}");
    }
    assert_eq!(found(rust, "use cudarc::driver::sys::cuCtxSynchronize;"), 1);
    assert_eq!(found(rust, "use cudarc::driver::{CudaContext, safe::CudaStream};"), 2);
    for fine in ["sys::cuEventQuery(e)", "sys::cuMemcpyHtoDAsync_v2(a, b, c, d)", "cudarc::driver::sys::cuInit(0)"] {
        assert_eq!(found(rust, &format!("/// As cuEventSynchronize.\nfn f() {{ {fine}; }}")), 0, "{fine}");
    }
    assert_eq!(found("kernels/a.cu", "// not cudaDeviceSynchronize\nint x;\n"), 0);
    assert_eq!(found("kernels/a.cu", "void f() { cudaDeviceSynchronize(); }"), 1);
}
