//! The kubeconfig as kubectl reads it: of the files that `KUBECONFIG` names those that are there, of which the first that says something counts.

use std::path::PathBuf;

use kube::config::{Kubeconfig, KubeconfigError};

/// What `KUBECONFIG` names, or `~/.kube/config`.
///
/// # Errors
/// There is none of them, or one cannot be read.
pub fn read() -> Result<Kubeconfig, KubeconfigError> {
    let named = std::env::var_os("KUBECONFIG").unwrap_or_default();
    // where there is none of them kube's own error says so
    merged(std::env::split_paths(&named))?.map_or_else(Kubeconfig::read, Ok)
}

fn merged(files: impl Iterator<Item = PathBuf>) -> Result<Option<Kubeconfig>, KubeconfigError> {
    let there = files.filter(|file| !file.as_os_str().is_empty() && file.exists());
    let mut before: Option<Kubeconfig> = None;
    for file in there {
        let mut read = Kubeconfig::read_from(file)?;
        // `kubectl config` writes an empty one, which says nothing
        read.current_context = read.current_context.filter(|name| !name.is_empty());
        before = Some(match before {
            Some(before) => before.merge(read)?,
            None => read,
        });
    }
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_and_one_without_a_context_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            dir.path().join(name)
        };
        let absent = dir.path().join("absent");
        let clusters =
            file("clusters", "clusters: [{name: one, cluster: {server: 'https://one'}}]\ncurrent-context: ''\n");
        let contexts =
            file("contexts", "contexts: [{name: c, context: {cluster: one, user: u}}]\ncurrent-context: c\n");
        let other = file("other", "current-context: other\n");
        let read = |files: &[&PathBuf]| merged(files.iter().map(|file| (*file).clone()));
        let config = read(&[&absent, &clusters, &contexts, &other]).unwrap().unwrap();
        assert_eq!(
            (config.current_context.as_deref(), config.clusters.len(), config.contexts.len()),
            (Some("c"), 1, 1)
        );
        assert!(read(&[&absent]).unwrap().is_none() && read(&[&PathBuf::new()]).unwrap().is_none());
        assert!(read(&[&clusters, &file("broken", "{")]).is_err());
    }
}
