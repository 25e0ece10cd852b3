//! Text to the terminal and files to the disk: whole or not at all.

use std::{
    io::{self, Write},
    path::Path,
    sync::{Mutex, PoisonError},
};

use crate::Failure;

/// Held while a file is put in its place.
static WRITING: Mutex<()> = Mutex::new(());

/// The exit code after Ctrl-C, as shells count it.
const INTERRUPTED: i32 = 130;

/// Lets Ctrl-C end the process only while no file is being written: files appear whole or not at all, and
/// nothing temporary is left.
pub fn finish_writing_when_interrupted() {
    let installed = ctrlc::set_handler(|| {
        let _written = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        std::process::exit(INTERRUPTED);
    });
    // Without a handler the process still ends at once; at worst a temporary file stays.
    drop(installed);
}

/// Writes a file by way of a temporary one beside it.
///
/// # Errors
/// [`Failure::Write`]; whatever was at `path` before is still there then.
pub fn write_file(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    replace(path, content).map_err(|error| Failure::Write {
        path: path.to_owned(),
        error,
    })
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    // What a plainly created file would have: temporary files are private.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.prefix(".tandem-").tempfile_in(directory)?;
    file.write_all(content)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Prints to standard output, in colour only where that is a terminal.
///
/// A reader who has seen enough (`tandem plan … | head`) ends the process quietly.
pub fn print(text: &str) {
    let mut stdout = anstream::stdout().lock();
    let printed = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    if let Err(error) = printed {
        std::process::exit(i32::from(error.kind() != io::ErrorKind::BrokenPipe));
    }
}

/// Prints what went wrong to standard error.
pub fn error(failure: &Failure) {
    // There is nobody left to tell when this fails.
    let _ = writeln!(anstream::stderr(), "\x1b[1;31merror:\x1b[0m {failure}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.svg");
        write_file(&path, b"first").unwrap();
        write_file(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = write_file(Path::new("no/such/place.svg"), b"").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot write no/such/place.svg: "),
            "{error}"
        );
    }
}
