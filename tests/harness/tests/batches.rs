//! Requests posted many at a time, and completions taken many at a time.

use gdrd_client::{
    AcquireOptions, ClientOptions, Operation, QueuePairOptions, RuntimeDir, Source, Status, Submission, SubmissionFlags,
};
use gdrd_harness::{Daemon, PATIENCE};

#[tokio::test]
async fn completions_are_taken_many_at_a_time_in_the_order_of_their_posts() {
    const COUNT: u64 = 20;
    const MOST: usize = 3;
    let daemon = Daemon::start();
    let dir = RuntimeDir::new(daemon.runtime_dir());
    let client = ClientOptions::default().runtime_dir(dir).connect().await.expect("it serves");
    let session = client.open_session("batches").await.expect("allowed");
    let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 20)).await.expect("a buffer");
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu("GPU0")).await.expect("a queue pair");
    queue_pair.connect(queue_pair.endpoint()).await.expect("reachable");
    let registration = buffer.registration(queue_pair.hca()).expect("registered");
    let local = registration.span(0, 8).expect("in range");
    let remote = registration.remote().span(64, 8).expect("in range");
    let write = Operation::Write { source: Source::Local(local), remote, imm: None };
    let batch: Vec<_> =
        (0..COUNT).map(|wr_id| Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation: write }).collect();
    let mut completions = Vec::new();
    assert_eq!(queue_pair.poll_into(&mut completions, MOST).expect("open"), 0, "nothing was posted");
    assert_eq!(queue_pair.post_batch(&batch).expect("room"), batch.len());
    while completions.len() < batch.len() {
        let before = completions.len();
        let added = queue_pair.poll_into(&mut completions, MOST).expect("open");
        assert!(added <= MOST && completions.len() == before + added);
        if added == 0 {
            completions.push(queue_pair.poll_busy(PATIENCE).expect("open").expect("a completion comes"));
        }
    }
    assert!(completions.iter().all(|completion| completion.status == Status::Success));
    assert!(completions.iter().map(|completion| completion.wr_id).eq(0..COUNT));
    queue_pair.destroy().await.expect("it is there");
}

#[tokio::test]
async fn an_ended_queue_pair_says_so_once_all_was_taken() {
    let daemon = Daemon::start();
    let dir = RuntimeDir::new(daemon.runtime_dir());
    let client = ClientOptions::default().runtime_dir(dir).connect().await.expect("it serves");
    let session = client.open_session("batches").await.expect("allowed");
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu("GPU0")).await.expect("a queue pair");
    session.close();
    session.ended().await;
    let mut completions = Vec::new();
    queue_pair.poll_into(&mut completions, 8).expect_err("its session has ended");
    assert!(completions.is_empty());
}
