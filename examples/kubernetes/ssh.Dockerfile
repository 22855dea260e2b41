# The image of mpijob.yaml: that of docker/Dockerfile.cpu, with the ssh by which mpirun starts ranks.
#
#     docker build --file examples/kubernetes/ssh.Dockerfile --tag asyncddp:ssh examples/kubernetes
#
# The MPI Operator mounts the keys, which are of this job alone. ssh has an environment of its own, so
# that commands in the virtual environment need names in /usr/local/bin.
ARG IMAGE=asyncddp:cpu
# hadolint ignore=DL3006 # the image is built here
FROM ${IMAGE}
# hadolint ignore=DL3002 # sshd and the keys are root's
USER root
# hadolint ignore=DL3008 # the distribution's
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && mkdir -p /run/sshd \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' >>/etc/ssh/ssh_config \
    && printf 'StrictModes no\nSetEnv PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin\n' >>/etc/ssh/sshd_config
